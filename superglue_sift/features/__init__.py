"""Read the files of photographs, and find keypoints with descriptors.

photo_folder  lists the photographs of a folder, and finds their masks.
images        reads a file to pixels, rotated upright or as stored.
features      holds the keypoints and descriptors of an image, or of a batch of images.
descriptors   normalizes descriptors.
sift          finds SIFT keypoints in pixels.
extractors    loads other extractors of features.
extraction    extracts the features of an image: reduces it, masks it, warns about it.
nearest       finds nearest neighbors, and selects keypoints for the network.
"""
