"""The Open Inference Protocol over gRPC, beside HTTP and with the same service.

``wire_types``      the protobuf messages of the protocol
``infer_request``   a request for an inference, apart from its values
``conversion``      between these messages and those of ``aftserve.api.open_inference``
``message_buffer``  the bytes that the messages of all calls hold
``call``            one call: its API key, limits, deadline, error status, metrics and log line
``methods``         the methods of the protocol
``health``          the standard health service
``addresses``       the addresses of the port
``endpoint``        the port, from its start to its end
"""
