"""Read the files of photographs, and find keypoints with descriptors.

photo_folder  lists the photographs of a folder, and finds their masks.
images        reads a file to pixels, rotated upright or as stored.
sift          finds SIFT keypoints in pixels.
extractors    loads other extractors of features, and knows the kinds of descriptors.
features      holds the keypoints and descriptors of one image.
store         keeps features of many images on disk.
nearest       finds nearest neighbours, and selects keypoints for the network.
"""
