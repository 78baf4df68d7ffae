"""Compute matches by the network of the paper, and read its weights.

config          has the sizes of the network, and what it sees.
batch           pads the features of several images, and joins batches.
superglue       computes the scores by an encoder and attention.
perceptron      has the perceptrons of the network, and their BatchNorm over all ranks.
sinkhorn        finds the assignment from the scores by optimal transport.
ground_truth    finds true matches, for the loss, the validation and the evaluation.
weights         writes and reads model files.
"""
