# aftserve on TensorRT with the plugins, and on ONNX Runtime where a bundle has no engine.
# From the repository's root:
#   docker build -f docker/gpu.Dockerfile -t aftserve-gpu .
#   docker run --gpus all --read-only --tmpfs /tmp -v aftserve-engines:/cache \
#     -v $PWD/model.bundle:/bundle:ro -p 8000:8000 aftserve-gpu
# The engine is built when it starts for the first time, and kept in the volume.
# BASE: another image in place of NVIDIA's. VERSION: as pyproject.toml has it.
ARG BASE=tensorrt
ARG VERSION=0.1.0

FROM nvcr.io/nvidia/tensorrt:25.09-py3 AS tensorrt

FROM ${BASE} AS builder
ARG VERSION
ARG AFT_CUDA_ARCH="80;86;89;90;100;120"
RUN apt-get update && apt-get install -y --no-install-recommends python3-pip python3-venv
WORKDIR /source
COPY constraints.txt .
COPY docker/requirements.txt docker/requirements-gpu.txt docker/
# The base image's own Python packages hold TensorRT.
RUN python3 -m venv --without-pip --system-site-packages /opt/aftserve \
    && pip --python /opt/aftserve install --no-cache-dir --require-hashes --ignore-installed \
       -r docker/requirements.txt -r docker/requirements-gpu.txt \
    && /opt/aftserve/bin/python -c 'import tensorrt' \
    && python3 -m venv /opt/tools && /opt/tools/bin/pip install --no-cache-dir --constraint constraints.txt cmake ninja
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY export export
COPY plugins plugins
COPY serve serve
RUN pip wheel --no-cache-dir --wheel-dir wheels . \
    && pip --python /opt/aftserve install --no-cache-dir --no-index \
       "$(echo "wheels/aftexport-$VERSION-"*.whl)[grpc,serve]"
RUN export PATH="/opt/tools/bin:/usr/local/cuda/bin:$PATH" \
    && cmake -S plugins/cuda -B build -G Ninja -DAFT_CUDA_ARCH="$AFT_CUDA_ARCH" \
    && cmake --build build \
    && cmake --install build --prefix "$(/opt/aftserve/bin/python -c 'import aftplugins; print(aftplugins.__path__[0])')" \
    && /opt/aftserve/bin/python -c 'import aftplugins; assert aftplugins.library("tensorrt"), "no plugins"'

FROM ${BASE}
ARG VERSION
LABEL org.opencontainers.image.title="aftserve-gpu" \
      org.opencontainers.image.description="Server for verified bundles, by TensorRT with plugins and by ONNX Runtime" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION"
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin aftserve \
    && install -d -o aftserve /cache
COPY --from=builder /opt/aftserve /opt/aftserve
ENV PATH=/opt/aftserve/bin:$PATH PYTHONUNBUFFERED=1 AFTSERVE_HOST=0.0.0.0 AFTEXPORT_CACHE=/cache
USER 10001
VOLUME /cache
EXPOSE 8000
# Building an engine takes minutes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=900s \
    CMD ["aftserve", "health", "--pid", "1"]
# The base image's own prints a banner.
ENTRYPOINT ["aftserve"]
CMD ["/bundle"]
