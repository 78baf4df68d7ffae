"""Photographs of all stages: `manifest` (the list), `sources` (reading files), `dali_decoder`,
`torchvision_decoder`."""
