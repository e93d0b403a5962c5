"""The Open Inference Protocol over gRPC, beside HTTP and with the same service.

``wire_types``      the protobuf messages of the protocol
``infer_request``   a request for an inference, apart from its values
``call``            one call: its API key, limits, deadline, error status, metrics and log line
``methods``         the methods of the protocol, and the conversion of their messages
``addresses``       the addresses of the port
``endpoint``        the port, from its start to its end, and the standard health service
"""
