"""Match two images with SuperGlue on SIFT keypoints. A library of its own: torch, numpy, OpenCV and safetensors.

In reading order: `superglue` (the network), `attention`, `packing`, `normalization`, `sinkhorn` (optimal transport) and
`sinkhorn_kernel`, `assignment`; `sift` and `batch` (what enters the network: THE shapes and units), `geometry`, `truth`
(which keypoints correspond); `inference`, `cuda_graphs`, `torch_compat`; `weights`, `drawing`, `errors`.
"""
