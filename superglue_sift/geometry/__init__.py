"""The geometry of matches.

two_view                  homographies, fundamental matrices, relative poses, local maps
guided_matching           further matches, where those around them lead
refinement                positions of matches to a fraction of a pixel
tracks                    keypoints of many photographs that show one point
verification              whether two photographs show one place, and their matches if they do
"""
