# The library for the CPU, in the versions that are tested.
#   docker build -t textenv --build-arg TORCH="torch==2.13.0 --index-url URL" .    # URL: the index of torch's builds for the CPU
#   docker run --rm -v "$PWD/runs:/work/runs" textenv train CartPole-v1 --run-dir runs/first
FROM python:3.12-slim

# Without this argument, pip takes the build for CUDA, of several gigabytes.
ARG TORCH="torch==2.13.0"
WORKDIR /source
COPY . .
RUN pip install --quiet --no-cache-dir ${TORCH}
RUN pip install --quiet --no-cache-dir --constraint constraints.txt '.[lora,tensorboard]'
# The small language model is made once, into the image.
RUN python -c "from algos import LMPolicy; LMPolicy.load('embedded')"

WORKDIR /work
ENTRYPOINT ["algos"]
CMD ["--help"]
