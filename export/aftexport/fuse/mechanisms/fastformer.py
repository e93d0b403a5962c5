"""Fastformer's additive attention, by its formula; the second pooling is of P, not of K:

    g[b,h,d] = sum_u softmax_u(Q Wa)[b,u,h] Q[b,u,h,d];  P = K * g
    V[b,t,h,d] * sum_u softmax_u(P Wb)[b,u,h] P[b,u,h,d]
"""

from aftexport.fuse.pattern import Rewrite, Subject


def match(subject: Subject) -> Rewrite | None:
    """See ``Pattern``."""
    return None
