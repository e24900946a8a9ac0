"""The digits equal the well-known ones."""

import hashlib

import torch

from rpcmp.examples import digits

THEIRS = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
"""SHA-256 of `images` and `target` of `sklearn.datasets.load_digits`, as bytes."""


def test_the_images_equal_those_of_scikit_learn() -> None:
    images, classes = digits.load_digits()
    numbers = [each.to(torch.uint8).numpy().tobytes() for each in (images * 16, classes)]
    assert hashlib.sha256(b"".join(numbers)).hexdigest() == THEIRS
    assert torch.equal(images * 16, (images * 16).round())
    assert (images.shape, classes.shape) == ((1797, 1, 8, 8), (1797,))
    assert (images.dtype, classes.dtype) == (torch.float32, torch.int64)
    assert images.is_contiguous()
