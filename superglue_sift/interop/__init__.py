"""Import and export files and arrays of other tools, whose packages are imported on use.

colmap     writes a COLMAP database ready to map, or matches the features of an existing one.
hloc       writes features and matches as hloc's HDF5 files, and matches for its match_features.
convert    converts OpenCV's DMatch, and the dictionaries of LightGlue and glue-factory.
"""
