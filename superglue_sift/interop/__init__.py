"""Import and export of files and arrays of other tools, whose packages are imported on use.

colmap           a COLMAP database of keypoints, matches and verified pairs, ready to map
colmap_stored    the features of an existing COLMAP database, matched into it
hloc             features and matches as hloc's HDF5 files, and a matcher for its match_features
convert          OpenCV's DMatch, dictionaries of LightGlue and glue-factory
"""
