"""ResNet-50 on ImageNet with torchrun, DDP or FSDP2: `torchrun ... -m torch_anderson.lab.imagenet --data DIR`."""
