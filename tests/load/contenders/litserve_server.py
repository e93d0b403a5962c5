"""LitServe as in its guide: one worker, with single documents or dynamic batches."""

from typing import Any

import litserve

from load.contenders.pytorch import Model, Options

_BATCH_SECONDS = 0.005


class Api(litserve.LitAPI):
    def __init__(self, options: Options, **more: Any) -> None:
        super().__init__(api_path="/infer", **more)
        self.options = options

    def setup(self, device: str) -> None:
        self.model = Model(self.options)

    def decode_request(self, request: dict[str, str]) -> list[int]:
        return self.model.tokenize(request["text"])

    def predict(self, ids: list[int]) -> Any:
        return self.model.classify([ids])[0]

    def encode_response(self, output: dict[str, float]) -> dict[str, Any]:
        return {"scores": output}


class BatchingApi(Api):
    def __init__(self, options: Options) -> None:
        super().__init__(options, max_batch_size=options.batch, batch_timeout=_BATCH_SECONDS)

    def batch(self, inputs: list[list[int]]) -> list[list[int]]:
        return inputs

    def predict(self, documents: list[list[int]]) -> Any:
        return self.model.classify(documents)

    def unbatch(self, output: list[dict[str, float]]) -> list[dict[str, float]]:
        return output


if __name__ == "__main__":
    options = Options.read()
    api = BatchingApi(options) if options.batch > 1 else Api(options)
    server = litserve.LitServer(api, accelerator="cpu", timeout=300)
    server.run("127.0.0.1", options.port, generate_client_file=False, log_level="warning")
