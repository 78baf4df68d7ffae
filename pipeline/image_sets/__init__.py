"""Photographs that stages share: `manifest` (the list), `sources` (reading files), `decode`,
`dali_decoder`.
"""
