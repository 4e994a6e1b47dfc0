#!/bin/bash
# The image of gb200.
# Made from the Dockerfile of the same build, instruction by instruction, for a container that can be written to and is
# saved afterwards. Run as root of that container: bash THIS_FILE CONTEXT WORK RESULT
# shellcheck disable=SC2016,SC2030,SC2031  # steps are told as they stand; what a side stage sets stays its own
#   CONTEXT: the build's directory, read only; WORK: an empty directory on a disk of the node; RESULT: what is told outside
set -eu

if [ "${DSV4KIT_BUILD:-}" != clean ]; then
  # What the submitting shell, Slurm and the container's start have set is not part of the image.
  known=(HOME=/root DSV4KIT_BUILD=clean "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
  for name in http_proxy https_proxy no_proxy all_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY; do
    [ -z "${!name:-}" ] || known+=("$name=${!name}")
  done
  while IFS= read -r line; do known+=("$line"); done < <(grep -E '^[A-Za-z_][A-Za-z0-9_]*=' /etc/environment 2>/dev/null || true)
  exec env -i "${known[@]}" bash "$0" "$@"
fi
unset DSV4KIT_BUILD
context=$1 work=$2 result=$3
ended() { echo "$?" >"$result/status"; }
trap ended EXIT
mkdir -p "$work/tmp" "$work/stages"
# Inside a container /tmp is often memory.
export TMPDIR=$work/tmp
cd /

machine=$(uname -m)
if [ "$machine" != aarch64 ]; then
  echo "error: this node is $machine, the image is for aarch64; PARTITION= names where such nodes are" >&2
  exit 1
fi

step() { echo "STEP $1/40: $2"; }

# copy ROOT DESTINATION SOURCE...: a directory's content, or a file into a directory where DESTINATION ends with /.
copy() {
  local root=$1 to=$2 source
  shift 2
  for source; do
    if [ -d "$root/$source" ]; then
      mkdir -p "$to"
      cp -Rp "$root/$source/." "$to"
    else
      case $to in */) mkdir -p "$to" ;; *) mkdir -p "${to%/*}/" ;; esac
      cp -p "$root/$source" "$to"
    fi
  done
}

# keep STAGE PATH...: for later stages, which copy from it.
keep() {
  local stage=$1 path
  shift
  for path; do
    mkdir -p "$work/stages/$stage/${path%/*}"
    cp -Rp "$path" "$work/stages/$stage/${path%/*}/"
  done
}

# cache ID DIRECTORY: the step's cache lies with the build's temporary files and not in the image.
cache() {
  mkdir -p "$work/cache/$1" "${2%/*}"
  rm -rf -- "$2"
  ln -s "$work/cache/$1" "$2"
}

# missing PATH...: of each path the topmost part that is not there.
missing() {
  local path part parent
  for path; do
    [ ! -e "$path" ] || continue
    part=${path%/}
    while parent=${part%/*}; [ -n "$parent" ] && [ ! -e "$parent" ]; do part=$parent; done
    echo "$part"
  done
}

# Stage system.
export LANG="C.UTF-8"
export PIP_NO_CACHE_DIR="1"
export PIP_NO_INPUT="1"
export PIP_PROGRESS_BAR="off"
export PIP_DISABLE_PIP_VERSION_CHECK="1"
export PATH="/opt/venv/bin:${PATH}"
step 1 'RUN set -eu; export DEBIAN_FRONTEND=noninteractive; apt-get update;...'
(
  set -eu;
  export DEBIAN_FRONTEND=noninteractive;
  apt-get update;
  apt-get install -y --no-install-recommends \
      build-essential \
      ca-certificates \
      git \
      ibverbs-providers \
      libibverbs1 \
      libnuma1 \
      librdmacm1 \
      ninja-build \
      numactl \
      python3.12 \
      python3.12-dev \
      python3.12-venv;
  rm -rf /var/lib/apt/lists/*;
  python3.12 -m venv /opt/venv;
  python -c 'import sys; assert "%d.%d" % sys.version_info[:2] == "3.12", sys.version'
)

# Stage compilable.
step 2 'COPY requirements/build.txt requirements/compile_with.txt /opt/dsv4...'
copy "$context" /opt/dsv4kit/requirements/ requirements/build.txt requirements/compile_with.txt
step 3 'RUN set -eu; unset PIP_NO_CACHE_DIR; pip install --no-deps --requir...'
cache dsv4kit-pip /root/.cache/pip
(
  set -eu;
  unset PIP_NO_CACHE_DIR;
  pip install --no-deps --require-hashes --requirement /opt/dsv4kit/requirements/build.txt
)
rm /root/.cache/pip
step 4 'RUN set -eu; unset PIP_NO_CACHE_DIR; pip install --no-deps --requir...'
cache dsv4kit-pip /root/.cache/pip
(
  set -eu;
  unset PIP_NO_CACHE_DIR;
  pip install --no-deps --require-hashes --no-build-isolation --requirement /opt/dsv4kit/requirements/compile_with.txt
)
rm /root/.cache/pip
step 5 'RUN set -eu; if [ -e /usr/local/cuda ]; then exit 0; fi; cuda=/opt/...'
(
  set -eu;
  if [ -e /usr/local/cuda ]; then exit 0; fi;
  cuda=/opt/venv/lib/python3.12/site-packages/nvidia/cu13;
  "${cuda}/bin/nvcc" --version;
  mkdir "${cuda}/targets";
  ln -s .. "${cuda}/targets/sbsa-linux";
  ln -s lib "${cuda}/lib64";
  mkdir "${cuda}/lib/stubs";
  grep -ohE '\bcu[A-Z][A-Za-z0-9_]*\b' "${cuda}/include/cuda.h" > /tmp/stub.c;
  sort -u -o /tmp/stub.c /tmp/stub.c;
  sed -i 's/.*/int &(void) { return 34; }/' /tmp/stub.c;
  gcc -shared -fPIC -w -Wl,-soname,libcuda.so.1 /tmp/stub.c -o "${cuda}/lib/stubs/libcuda.so";
  rm /tmp/stub.c;
  for library in "${cuda}"/lib/lib*.so.*; do
      name="${library%%.so.*}.so";
      if [ ! -e "${name}" ]; then ln -s "${library##*/}" "${name}"; fi;
  done;
  ln -s "${cuda}" /usr/local/cuda
)

# Stage packages.
step 6 'COPY requirements/packages.txt /opt/dsv4kit/requirements/'
copy "$context" /opt/dsv4kit/requirements/ requirements/packages.txt
step 7 'RUN set -eu; unset PIP_NO_CACHE_DIR; pip install --no-deps --requir...'
cache dsv4kit-pip /root/.cache/pip
(
  set -eu;
  unset PIP_NO_CACHE_DIR;
  pip install --no-deps --require-hashes --no-build-isolation --requirement /opt/dsv4kit/requirements/packages.txt
)
rm /root/.cache/pip

# Stage sources.
mapfile -t own < <(missing /src /src/given/megatron-core /src/given/megatron-bridge /src/given/verl)
(
export MEGATRON_CORE_SOURCE="https://github.com/NVIDIA/Megatron-LM"
step 8 'COPY sources/megatron-core /src/given/megatron-core'
copy "$context" /src/given/megatron-core sources/megatron-core
step 9 'RUN set -eu; if [ -d /src/given/megatron-core/tree ]; then rm -rf /...'
(
  set -eu;
  if [ -d /src/given/megatron-core/tree ]; then \
      rm -rf /src/megatron-core;
      mv /src/given/megatron-core/tree /src/megatron-core;
  else \
      git init --quiet /src/megatron-core;
      git -C /src/megatron-core fetch --quiet --depth=1 "${MEGATRON_CORE_SOURCE}" 43e45e13074f36da68b34c7a189cd997a01d1b41;
      git -C /src/megatron-core checkout --quiet --detach FETCH_HEAD;
      test "$(git -C /src/megatron-core rev-parse HEAD)" = 43e45e13074f36da68b34c7a189cd997a01d1b41;
  fi;
  mkdir -p /src/shas;
  echo 43e45e13074f36da68b34c7a189cd997a01d1b41 > /src/shas/megatron-core;
  rm -rf /src/megatron-core/.git
)
export MEGATRON_BRIDGE_SOURCE="https://github.com/NVIDIA-NeMo/Megatron-Bridge"
step 10 'COPY sources/megatron-bridge /src/given/megatron-bridge'
copy "$context" /src/given/megatron-bridge sources/megatron-bridge
step 11 'RUN set -eu; if [ -d /src/given/megatron-bridge/tree ]; then rm -rf...'
(
  set -eu;
  if [ -d /src/given/megatron-bridge/tree ]; then \
      rm -rf /src/megatron-bridge;
      mv /src/given/megatron-bridge/tree /src/megatron-bridge;
  else \
      git init --quiet /src/megatron-bridge;
      git -C /src/megatron-bridge fetch --quiet --depth=1 "${MEGATRON_BRIDGE_SOURCE}" 51885cf132b2814188b6855c25a8588254274c2a;
      git -C /src/megatron-bridge checkout --quiet --detach FETCH_HEAD;
      test "$(git -C /src/megatron-bridge rev-parse HEAD)" = 51885cf132b2814188b6855c25a8588254274c2a;
  fi;
  mkdir -p /src/shas;
  echo 51885cf132b2814188b6855c25a8588254274c2a > /src/shas/megatron-bridge;
  rm -rf /src/megatron-bridge/.git
)
export VERL_SOURCE="https://github.com/verl-project/verl"
export VERL_SHA=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
step 12 'COPY sources/verl /src/given/verl'
copy "$context" /src/given/verl sources/verl
step 13 'RUN set -eu; if ! expr "${VERL_SHA}" : '"'"'[0-9a-f]\{40\}$'"'"' > /dev/nul...'
(
  set -eu;
  if ! expr "${VERL_SHA}" : '[0-9a-f]\{40\}$' > /dev/null; then \
      echo "VERL_SHA: a full commit sha is needed, not '${VERL_SHA}'" >&2; exit 1;
  fi;
  if [ -d /src/given/verl/tree ]; then \
      mv /src/given/verl/tree /src/verl;
  else \
      git clone --quiet --no-checkout --filter=blob:none "${VERL_SOURCE}" /src/verl;
      git -C /src/verl checkout --quiet --detach "${VERL_SHA}";
      for commit in 3dd97a0 0bd668c; do
          git -C /src/verl merge-base --is-ancestor "${commit}" HEAD ||
              { echo "VERL_SHA: verl at ${VERL_SHA} is without ${commit}" >&2; exit 1; };
      done;
  fi;
  mkdir -p /src/shas;
  echo "${VERL_SHA}" > /src/shas/verl;
  rm -rf /src/verl/.git
)
keep sources /src
)
[ "${#own[@]}" = 0 ] || rm -rf -- "${own[@]}"

# Stage early.
mapfile -t own < <(missing /opt/early/proof /src /opt/dsv4kit/kit /opt/dsv4kit/image.json)
(
step 14 'COPY /src /src'
copy "$work"/stages/sources /src /src
step 15 'RUN set -eu; pip install --no-deps --no-build-isolation /src/megatr...'
(
  set -eu;
  pip install --no-deps --no-build-isolation /src/megatron-core /src/megatron-bridge /src/verl;
  rm -rf /src
)
step 16 'COPY kit /opt/dsv4kit/kit'
copy "$context" /opt/dsv4kit/kit kit
step 17 'COPY image.json /opt/dsv4kit/image.json'
copy "$context" /opt/dsv4kit/image.json image.json
step 18 'RUN set -eu; printf '"'"'/opt/dsv4kit/kit\n'"'"' > /opt/venv/lib/python3.12...'
(
  set -eu;
  printf '/opt/dsv4kit/kit\n' > /opt/venv/lib/python3.12/site-packages/dsv4kit.pth;
  python -m dsv4kit.image.manifest --early /opt/dsv4kit;
  mkdir /opt/early;
  printf 'fits\n' > /opt/early/proof;
  touch -d @315532800 /opt/early/proof /opt/early
)
keep early /opt/early/proof
)
[ "${#own[@]}" = 0 ] || rm -rf -- "${own[@]}"

# Stage kernels.
mapfile -t own < <(missing /wheels /src/shas /opt/early/proof /opt/dsv4kit/requirements/ /src/ready/packages /src/given/fast-hadamard-transform /src/ready/fast-hadamard-transform /src/given/flash-mla-cutlass /src/given/flash-mla /src/ready/flash-mla)
(
step 19 'COPY /opt/early/proof /opt/early/proof'
copy "$work"/stages/early /opt/early/proof /opt/early/proof
export MAX_JOBS="4"
export NVCC_THREADS="2"
export CUDA_HOME="/usr/local/cuda"
export TORCH_CUDA_ARCH_LIST="10.0"
export NVTE_CUDA_ARCHS="100"
export NVTE_FRAMEWORK="pytorch"
export NVTE_PYTORCH_FORCE_BUILD="TRUE"
export FAST_HADAMARD_TRANSFORM_FORCE_BUILD="TRUE"
export FLASH_MLA_DISABLE_SM90="TRUE"
export CPATH="/usr/local/cuda/targets/sbsa-linux/include/cccl:/opt/venv/lib/python3.12/site-packages/nvidia/cudnn/include:/opt/venv/lib/python3.12/site-packages/nvidia/nccl/include"
export CUDNN_PATH="/opt/venv/lib/python3.12/site-packages/nvidia/cudnn"
step 20 'RUN set -eu; case "$(ldconfig -p)" in *libcudnn.so*) echo "BASE_IMA...'
(
  set -eu;
  case "$(ldconfig -p)" in
      *libcudnn.so*) echo "BASE_IMAGE has a cuDNN of its own; take one without" >&2; exit 1 ;;
  esac
)
step 21 'COPY requirements/compiled.txt /opt/dsv4kit/requirements/'
copy "$context" /opt/dsv4kit/requirements/ requirements/compiled.txt
step 22 'COPY wheels/packages /src/ready/packages'
copy "$context" /src/ready/packages wheels/packages
step 23 'RUN set -eu; mkdir -p /wheels/packages; set -- /src/ready/packages/...'
(
  set -eu;
  mkdir -p /wheels/packages;
  set -- /src/ready/packages/*.whl;
  if [ -e "$1" ]; then cp "$@" /wheels/packages/; exit 0; fi;
  pip wheel --no-deps --require-hashes --no-build-isolation --wheel-dir /wheels/packages \
      --requirement /opt/dsv4kit/requirements/compiled.txt
)
export FAST_HADAMARD_TRANSFORM_SOURCE="https://github.com/Dao-AILab/fast-hadamard-transform"
step 24 'COPY sources/fast-hadamard-transform /src/given/fast-hadamard-trans...'
copy "$context" /src/given/fast-hadamard-transform sources/fast-hadamard-transform
step 25 'COPY wheels/fast-hadamard-transform /src/ready/fast-hadamard-transform'
copy "$context" /src/ready/fast-hadamard-transform wheels/fast-hadamard-transform
step 26 'RUN set -eu; mkdir -p /wheels/fast-hadamard-transform; mkdir -p /sr...'
(
  set -eu;
  mkdir -p /wheels/fast-hadamard-transform;
  mkdir -p /src/shas;
  echo 1cc807efbd6cc001df359822d60bf6052dd66859 > /src/shas/fast-hadamard-transform;
  set -- /src/ready/fast-hadamard-transform/*.whl;
  if [ -e "$1" ]; then cp "$@" /wheels/fast-hadamard-transform/; exit 0; fi;
  if [ -d /src/given/fast-hadamard-transform/tree ]; then \
      rm -rf /src/fast-hadamard-transform;
      mv /src/given/fast-hadamard-transform/tree /src/fast-hadamard-transform;
  else \
      git init --quiet /src/fast-hadamard-transform;
      git -C /src/fast-hadamard-transform fetch --quiet --depth=1 "${FAST_HADAMARD_TRANSFORM_SOURCE}" 1cc807efbd6cc001df359822d60bf6052dd66859;
      git -C /src/fast-hadamard-transform checkout --quiet --detach FETCH_HEAD;
      test "$(git -C /src/fast-hadamard-transform rev-parse HEAD)" = 1cc807efbd6cc001df359822d60bf6052dd66859;
  fi;
  pip wheel --no-deps --no-build-isolation --wheel-dir /wheels/fast-hadamard-transform /src/fast-hadamard-transform
)
export FLASH_MLA_SOURCE="https://github.com/deepseek-ai/FlashMLA"
export FLASH_MLA_CUTLASS_SOURCE="https://github.com/NVIDIA/cutlass"
step 27 'COPY sources/flash-mla-cutlass /src/given/flash-mla-cutlass'
copy "$context" /src/given/flash-mla-cutlass sources/flash-mla-cutlass
step 28 'COPY sources/flash-mla /src/given/flash-mla'
copy "$context" /src/given/flash-mla sources/flash-mla
step 29 'COPY wheels/flash-mla /src/ready/flash-mla'
copy "$context" /src/ready/flash-mla wheels/flash-mla
step 30 'RUN set -eu; mkdir -p /wheels/flash-mla; mkdir -p /src/shas; echo b...'
(
  set -eu;
  mkdir -p /wheels/flash-mla;
  mkdir -p /src/shas;
  echo b7643bd54521f563b839b98289b5cd048c062ba2 > /src/shas/flash-mla;
  set -- /src/ready/flash-mla/*.whl;
  if [ -e "$1" ]; then cp "$@" /wheels/flash-mla/; exit 0; fi;
  if [ -d /src/given/flash-mla/tree ]; then \
      rm -rf /src/flash-mla;
      mv /src/given/flash-mla/tree /src/flash-mla;
  else \
      git init --quiet /src/flash-mla;
      git -C /src/flash-mla fetch --quiet --depth=1 "${FLASH_MLA_SOURCE}" b7643bd54521f563b839b98289b5cd048c062ba2;
      git -C /src/flash-mla checkout --quiet --detach FETCH_HEAD;
      test "$(git -C /src/flash-mla rev-parse HEAD)" = b7643bd54521f563b839b98289b5cd048c062ba2;
      test "$(git -C /src/flash-mla rev-parse HEAD:csrc/cutlass)" = 147f5673d0c1c3dcf66f78d677fd647e4a020219;
  fi;
  if [ -d /src/given/flash-mla-cutlass/tree ]; then \
      rm -rf /src/flash-mla/csrc/cutlass;
      mv /src/given/flash-mla-cutlass/tree /src/flash-mla/csrc/cutlass;
  else \
      git init --quiet /src/flash-mla/csrc/cutlass;
      git -C /src/flash-mla/csrc/cutlass fetch --quiet --depth=1 "${FLASH_MLA_CUTLASS_SOURCE}" 147f5673d0c1c3dcf66f78d677fd647e4a020219;
      git -C /src/flash-mla/csrc/cutlass checkout --quiet --detach FETCH_HEAD;
      test "$(git -C /src/flash-mla/csrc/cutlass rev-parse HEAD)" = 147f5673d0c1c3dcf66f78d677fd647e4a020219;
  fi;
  pip wheel --no-deps --no-build-isolation --wheel-dir /wheels/flash-mla /src/flash-mla
)
keep kernels /wheels /src/shas
)
[ "${#own[@]}" = 0 ] || rm -rf -- "${own[@]}"

# Stage wheels.
mapfile -t own < <(missing /wheels)
(
step 31 'COPY /wheels /wheels'
copy "$work"/stages/kernels /wheels /wheels
)
[ "${#own[@]}" = 0 ] || rm -rf -- "${own[@]}"

# Stage trainer.
step 32 'COPY /wheels /src/wheels'
copy "$work"/stages/kernels /src/wheels /wheels
step 33 'COPY /src/shas /opt/dsv4kit/shas'
copy "$work"/stages/kernels /opt/dsv4kit/shas /src/shas
step 34 'RUN set -eu; pip install --no-deps --no-index /src/wheels/*/*.whl; ...'
(
  set -eu;
  pip install --no-deps --no-index /src/wheels/*/*.whl;
  rm -rf /src/wheels
)
step 35 'COPY /src /src'
copy "$work"/stages/sources /src /src
step 36 'RUN set -eu; pip install --no-deps --no-build-isolation /src/megatr...'
(
  set -eu;
  pip install --no-deps --no-build-isolation /src/megatron-core /src/megatron-bridge /src/verl;
  mv /src/shas/* /opt/dsv4kit/shas/;
  rm -rf /src
)

# Stage image.
export NVIDIA_VISIBLE_DEVICES="all"
export NVIDIA_DRIVER_CAPABILITIES="compute,utility"
export CUDA_HOME="/usr/local/cuda"
export CPATH="/usr/local/cuda/targets/sbsa-linux/include/cccl"
step 37 'COPY kit /opt/dsv4kit/kit'
copy "$context" /opt/dsv4kit/kit kit
step 38 'COPY image.json /opt/dsv4kit/image.json'
copy "$context" /opt/dsv4kit/image.json image.json
step 39 'RUN set -eu; printf '"'"'export PATH=%s\n'"'"' "${PATH}" > /etc/profile.d/0...'
(
  set -eu;
  printf 'export PATH=%s\n' "${PATH}" > /etc/profile.d/00-image-path.sh;
  printf '/opt/dsv4kit/kit\n' > /opt/venv/lib/python3.12/site-packages/dsv4kit.pth
)
step 40 'RUN set -eu; python -m dsv4kit.image.manifest /opt/dsv4kit'
(
  set -eu;
  python -m dsv4kit.image.manifest /opt/dsv4kit
)
export VERL_SHA=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
export STACK_HASH=0123456789ab
export KIT_REVISION=1111111111111111111111111111111111111111
label_0="dsv4kit gb200"
label_1="${KIT_REVISION}"
label_2="gb200"
label_3="aarch64"
label_4="pro-grpo"
label_5="1cc807efbd6cc001df359822d60bf6052dd66859"
label_6="b7643bd54521f563b839b98289b5cd048c062ba2"
label_7="43e45e13074f36da68b34c7a189cd997a01d1b41"
label_8="51885cf132b2814188b6855c25a8588254274c2a"
label_9="${VERL_SHA}"
label_10="${STACK_HASH}"
mkdir -p /opt/dsv4kit
unset VERL_SHA STACK_HASH KIT_REVISION

# The image's configuration, where enroot looks for it.
variables=(LANG PIP_NO_CACHE_DIR PIP_NO_INPUT PIP_PROGRESS_BAR PIP_DISABLE_PIP_VERSION_CHECK PATH NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES CUDA_HOME CPATH)
touch /etc/environment
{
  grep -vE "^($(IFS='|'; echo "${variables[*]}"))=" /etc/environment || true
  for name in "${variables[@]}"; do printf '%s=%s\n' "$name" "${!name}"; done
} >"$work/environment"
cat "$work/environment" >/etc/environment
rm -f /etc/rc /etc/rc.local
: >/etc/rc.local
{
  printf '# from %s\n' localhost/dsv4kit-gb200:1
  printf '# %s %s\n' org.opencontainers.image.title "${label_0}"
  printf '# %s %s\n' org.opencontainers.image.revision "${label_1}"
  printf '# %s %s\n' dsv4kit.hardware "${label_2}"
  printf '# %s %s\n' dsv4kit.architecture "${label_3}"
  printf '# %s %s\n' dsv4kit.stack "${label_4}"
  printf '# %s %s\n' dsv4kit.git.fast-hadamard-transform "${label_5}"
  printf '# %s %s\n' dsv4kit.git.flash-mla "${label_6}"
  printf '# %s %s\n' dsv4kit.git.megatron-core "${label_7}"
  printf '# %s %s\n' dsv4kit.git.megatron-bridge "${label_8}"
  printf '# %s %s\n' dsv4kit.git.verl "${label_9}"
  printf '# %s %s\n' dsv4kit.stack-hash "${label_10}"
  cat <<'RC'
mkdir -p /opt/dsv4kit 2>/dev/null
cd /opt/dsv4kit || exit 1
unset OLDPWD
[ ! -s /etc/rc.local ] || . /etc/rc.local
if [ "$#" -gt 0 ]; then exec "$@"; fi
exec /bin/bash
RC
} >/etc/rc
chmod 644 /etc/rc /etc/rc.local /etc/environment
cp /opt/dsv4kit/manifest.json "$result/manifest.json"
echo "dsv4kit: the image is proved"
