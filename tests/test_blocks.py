"""Parameters as flat vectors."""

import torch
from torch import nn

from torch_anderson._tensors.blocks import Space


def test_a_vector_never_has_the_pieces_of_one_that_is_gone():
    """Python gives the identity of an object that is gone to the next one of its kind."""
    space = Space([{"params": [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]}], None)
    (block,) = space.blocks
    gone = {id(space.vector()[0]) for _ in range(20)}
    others = [torch.ones(5) for _ in range(200)]
    assert gone
    for other in others:
        assert block.pieces(other)[0].data_ptr() == other.data_ptr()
