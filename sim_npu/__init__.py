"""A model of an Ascend AI Core that runs Pallas-style tile kernels."""
