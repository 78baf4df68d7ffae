"""The geometry of matches.

two_view                  homographies and fundamental matrices of two views
pose                      relative poses of two cameras
local_maps                affine maps of the matches around a match
refinement, patches       positions of matches to a fraction of a pixel
tracks                    keypoints of many photographs that show one point
verification              whether two photographs show one place, and their matches if they do
"""
