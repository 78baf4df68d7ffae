"""Other tools' files and arrays, in and out; each tool's package is loaded when it is asked for.

colmap    a COLMAP database of keypoints, matches and verified pairs, ready to map
hloc      features and matches as hloc's HDF5 files, and a matcher for its match_features
arrays    OpenCV's DMatch, kornia's indices, dictionaries of LightGlue and glue-factory, transformers' results
"""
