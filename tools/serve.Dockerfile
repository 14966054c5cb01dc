# `sbkit serve` with ONNX Runtime, without torch. The image takes bundles and options of `sbkit serve`:
#
#     docker build -f tools/serve.Dockerfile -t sbkit-serve .
#     docker run --read-only --tmpfs /tmp -v "$PWD/my-model:/my-model:ro" \
#         -v "$PWD/keys.txt:/keys.txt:ro" -p 8000:8000 sbkit-serve /my-model --api-key-file /keys.txt
#
# For a GPU, on any base with Python and the driver's libraries; the server then refuses to start
# without one:
#
#     docker build -f tools/serve.Dockerfile -t sbkit-serve-gpu --build-arg DEVICE=cuda \
#         --build-arg "ONNXRUNTIME=onnxruntime-gpu[cuda,cudnn]" .
#     docker run --gpus all ... sbkit-serve-gpu /my-model --api-key-file /keys.txt
ARG BASE=python:3.12-slim
FROM ${BASE} AS build
COPY . /source
RUN pip wheel --no-deps --wheel-dir /wheels /source

FROM ${BASE}
ARG ONNXRUNTIME=onnxruntime
ARG DEVICE=auto
ENV DEVICE=${DEVICE}
COPY constraints.txt tools/runtime.txt tools/serve.txt /tools/
RUN sed -i "s/^onnxruntime /${ONNXRUNTIME} /" /tools/runtime.txt
RUN pip install --no-cache-dir -c /tools/constraints.txt -r /tools/runtime.txt -r /tools/serve.txt
RUN --mount=from=build,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
USER 65534:65534
EXPOSE 8000
# The server is ready after it has run every shape once: seconds for a small model, minutes for a
# large one.
HEALTHCHECK --start-period=10m --interval=10s CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health/ready')"]
ENTRYPOINT ["sh", "-c", "exec sbkit serve --runtime onnx --device $DEVICE --host 0.0.0.0 \"$@\"", "serve"]
