"""The base of heads that decide for labels of a document."""

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from aftexport.heads.head import Double, Head

Decisions = NDArray[np.int64]


class DecidingHead(Head):
    """The meaning of an output whose scores are probabilities of labels for a document."""

    @abstractmethod
    def decisions(self, logits: Double) -> Decisions:
        """Return the decisions for logits ``[..., width]``.

        They are the index of the label ``[...]``, or for each of independent labels ``[...,
        width]`` 1 if it holds, else 0. Answers, flips and calibrations follow them.
        """
