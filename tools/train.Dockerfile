# An image for training on a cluster: /work is a project of `sbkit new`, with the versions of constraints.txt.
#
#     docker build -f tools/train.Dockerfile -t sbkit-train .
#     docker run --gpus all --shm-size=16g -v /data:/data sbkit-train torchrun --nproc_per_node=gpu \
#         train.py hparams/ctc.yaml --data_folder=/data/cv-corpus-22.0 --output_folder=/data/results
#
# For ONNX on a GPU: --build-arg "ONNXRUNTIME=onnxruntime-gpu[cuda,cudnn]"
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG ONNXRUNTIME=onnxruntime
COPY . /source
RUN pip install --no-cache-dir -c /source/constraints.txt "/source[curves,s3]" "${ONNXRUNTIME}" && sbkit new /work
WORKDIR /work
