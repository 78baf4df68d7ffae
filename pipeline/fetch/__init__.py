"""Stage 1: list the photographs, download what is missing, hold some out.

`dataset` (folders, zips and lists; the split; the manifest and the images that it lists), `coco`
(COCO's archives, downloaded whole or in part), `decoders` (JPEG by torchvision and DALI).
"""
