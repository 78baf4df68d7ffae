"""From the files of photographs to keypoints with descriptors.

images        a file to pixels, rotated upright or as stored
sift          pixels to SIFT keypoints
extractors    other features and the kinds of their descriptors
features      the keypoints and descriptors of one image
store         features of many images, kept on disk
nearest       nearest neighbours, the ratio test, selection of keypoints for the network
"""
