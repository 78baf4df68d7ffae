"""Stage 1: list the photographs, download what is missing, hold some out.

`dataset` reads folders, zips and lists, splits them, and reads the images of the manifest. `coco`
downloads COCO's archives, whole or in part. `decoders` decodes JPEG by torchvision and DALI.
"""
