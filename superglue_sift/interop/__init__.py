"""Import and export of files and arrays of other tools, whose packages are imported on use.

colmap     a COLMAP database ready to map, and matches for the features of an existing one
hloc       features and matches as hloc's HDF5 files, and a matcher for its match_features
convert    OpenCV's DMatch, dictionaries of LightGlue and glue-factory
"""
