"""Photographs that stages share: `manifest` (which), `sources` (where they are read), `decode`, `dali_decoder`."""
