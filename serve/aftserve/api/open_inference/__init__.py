"""The Open Inference Protocol, version 2, with Triton's extension for binary tensors.

https://github.com/kserve/open-inference-protocol (specification/protocol/inference_rest.md)
https://github.com/triton-inference-server/server (docs/protocol/extension_binary_data.md)

``tensors``  tensors as JSON or bytes
``schemas``  the JSON around them
``messages`` a request's documents, and the response with their results
``descriptions`` of the server, its model and the model's configuration
``routes``   the endpoints below ``/v2``
``repository_routes`` the list of the models, their loads and unloads
"""
