# aftserve on ONNX Runtime with the fused kernels. From the repository's root:
#   docker build -f docker/cpu.Dockerfile -t aftserve .
#   docker run --read-only --tmpfs /tmp -v $PWD/model.bundle:/bundle:ro -p 8000:8000 aftserve
# BASE: another image in place of this Debian. VERSION: as pyproject.toml has it.
ARG BASE=debian
ARG VERSION=0.1.0

FROM debian:trixie-slim@sha256:d7e12182ce18b85b93007c1dedf31f2d29e01ccf3182cc4017c709b6259bc132 AS debian

FROM ${BASE} AS builder
ARG VERSION
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-pip python3-venv
WORKDIR /source
# Apart from the sources, so that a change of those does not install all of it again.
COPY docker/requirements.txt docker/
# Without pip in it: nothing is to be installed later.
RUN python3 -m venv --without-pip /opt/aftserve \
    && pip --python /opt/aftserve install --no-cache-dir --require-hashes -r docker/requirements.txt
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY export export
COPY plugins plugins
COPY serve serve
# Without an index: a requirement that is not pinned fails. A wheel without the kernels would be made where they cannot be
# compiled.
RUN pip wheel --no-cache-dir --wheel-dir wheels . \
    && pip --python /opt/aftserve install --no-cache-dir --no-index \
       "$(echo "wheels/aftexport-$VERSION-"*.whl)[grpc,serve]" \
    && pip --python /opt/aftserve check \
    && /opt/aftserve/bin/python -c 'import aftplugins; assert aftplugins.library("onnxruntime"), "no kernels"' \
    && find /opt/aftserve -type d -name tests -prune -exec rm -r {} +

FROM ${BASE}
ARG VERSION
LABEL org.opencontainers.image.title="aftserve" \
      org.opencontainers.image.description="Server for verified bundles, by ONNX Runtime with fused kernels" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION"
RUN apt-get update && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists /var/cache/apt /var/log/apt /var/log/dpkg.log /usr/share/doc \
    && useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin aftserve
COPY --from=builder /opt/aftserve /opt/aftserve
ENV PATH=/opt/aftserve/bin:$PATH PYTHONUNBUFFERED=1 AFTSERVE_HOST=0.0.0.0
USER 10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["aftserve", "health", "--pid", "1"]
ENTRYPOINT ["aftserve"]
CMD ["/bundle"]
