"""How the sampler gets the trainer's weights: names agreed first, digests compared after."""
