"""Plain FastAPI: a function behind a route, which runs in the framework's thread pool."""

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from load.contenders.pytorch import Model, Options


class Question(BaseModel):
    text: str


def create_app(model: Model) -> FastAPI:
    app = FastAPI()

    @app.post("/infer")
    def infer(question: Question) -> dict[str, dict[str, float]]:
        return {"scores": model.classify([model.tokenize(question.text)])[0]}

    return app


if __name__ == "__main__":
    options = Options.read()
    app = create_app(Model(options))
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")
