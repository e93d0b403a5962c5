"""Documents of any length in bounded memory, exactly.

Everything between two attentions acts on each token alone; an attention acts on a token and
on a *summary* of all others, because a set of keys and values is as good as a few of them
(``summary``). So a document runs chunk by chunk, layer by layer, in two passes: ``reduce``
summarises every chunk's keys and values, ``apply`` attends from each chunk to itself and to the
summaries of the rest. The answer is that of the whole document.

``summary``    keys and values that stand for those of many tokens, for each mechanism
``means``      rewrites what pools tokens twice, or by a softmax, as attention
``tokenwise``  tells what acts on each token alone, and refuses what this does not hold for
``partition``  cuts the graph into the graphs of both passes
``archive``    keeps them in the bundle

``aftexport.chunked.runner`` runs them, without any of this package or torch.
"""
