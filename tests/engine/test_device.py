"""Large tensors are zeroed, aligned to huge pages, and outlive the call that made them."""

import gc

import torch

from engine.device import zeros


def test_a_large_tensor_is_zeroed_and_keeps_its_memory() -> None:
    """Also after the mapping that it lies in has no other owner."""
    shape = (3, 5, 1 << 20)
    tensor = zeros(shape, torch.bfloat16)
    gc.collect()
    assert tensor.shape == shape
    assert tensor.dtype == torch.bfloat16
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % (2 << 20) == 0
    assert not tensor.any()
    tensor.fill_(1)
    assert int(tensor.sum(dtype=torch.int64)) == tensor.numel()


def test_a_small_tensor_takes_no_mapping_of_its_own() -> None:
    """A huge page for a few bytes would be waste."""
    assert zeros((2, 3), torch.float32).tolist() == [[0.0] * 3] * 2
