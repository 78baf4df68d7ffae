"""The network, written from the SuperGlue paper (arXiv 1911.11763).

`superglue` (keypoint encoder, layers, scores, matches), `attention` and `chunked_attention`, `packing` (sets of
different sizes in one tensor) and `fixed_layout` (the same in fixed shapes), `normalization`, `orientation` and
`neighbours` (inputs beyond the paper), `sinkhorn` and `sinkhorn_kernel` (optimal transport), `inference` and
`cuda_graphs` (fewer launches).
"""
