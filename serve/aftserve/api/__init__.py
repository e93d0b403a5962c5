"""The endpoints: request bodies, API keys, error responses, OpenAPI and the web page."""
