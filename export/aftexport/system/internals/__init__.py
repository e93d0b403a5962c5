"""Parts of torch, onnxscript and Python that these do not promise to keep.

Each module holds the parts of one kind, and the versions that have all of them. Other modules use
these parts only from here. ``aftserve.http.uvicorn_internals`` does the same for uvicorn.
"""
