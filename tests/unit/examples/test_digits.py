"""The digits equal the well-known ones."""

import torch

from rpcmp.examples import digits


def test_the_images_equal_those_of_scikit_learn() -> None:
    from sklearn import datasets  # which takes a second

    images, classes = digits.load_digits()
    theirs = datasets.load_digits()
    assert torch.equal(images.squeeze(1) * 16, torch.tensor(theirs.images, dtype=torch.float32))
    assert torch.equal(classes, torch.tensor(theirs.target))
    assert (images.dtype, classes.dtype) == (torch.float32, torch.int64)
    assert images.is_contiguous()
