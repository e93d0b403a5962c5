"""LitServe as its guide has it: one worker, batches as they come."""

from typing import Any

import litserve

from load.contenders.pytorch import Model, Options

_MOST_DOCUMENTS = 8
_BATCH_SECONDS = 0.005


class Api(litserve.LitAPI):
    def __init__(self, options: Options) -> None:
        super().__init__(
            max_batch_size=_MOST_DOCUMENTS, batch_timeout=_BATCH_SECONDS, api_path="/infer"
        )
        self.options = options

    def setup(self, device: str) -> None:
        self.model = Model(self.options)

    def decode_request(self, request: dict[str, str]) -> list[int]:
        return self.model.tokenize(request["text"])

    def batch(self, inputs: list[list[int]]) -> list[list[int]]:
        return inputs

    def predict(self, documents: list[list[int]]) -> list[dict[str, float]]:
        return self.model.classify(documents)

    def unbatch(self, output: list[dict[str, float]]) -> list[dict[str, float]]:
        return output

    def encode_response(self, output: dict[str, float]) -> dict[str, Any]:
        return {"scores": output}


if __name__ == "__main__":
    options = Options.read()
    server = litserve.LitServer(Api(options), accelerator="cpu", timeout=300)
    server.run("127.0.0.1", options.port, generate_client_file=False, log_level="warning")
