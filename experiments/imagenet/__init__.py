"""ResNet-50 on ImageNet with torchrun, DDP or FSDP2: `torchrun ... -m experiments.imagenet --data DIR`."""
