"""The network, from the equations of the paper to the files of its weights.

batch           keypoints of pairs as tensors: all shapes and units
superglue       the network: encoder, attention, scores
sinkhorn        optimal transport of the scores
ground_truth    which keypoints correspond, for the loss, the validation and the evaluation
weights         model files
"""
