"""On PYTHONPATH, this installs the faults of SG_FAULT in every Python process that imports the
training.
"""

import importlib.machinery
import os
import sys

TRAINER = "pipeline.train.train"


class Finder:
    """Finds the module of the training, and patches the training when it has been loaded."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != TRAINER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
            from faults import inject

            inject.install()

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("SG_FAULT"):
    sys.meta_path.insert(0, Finder)
