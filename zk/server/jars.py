"""Finds the jars of the ZooKeeper server: METAMQ_ZOOKEEPER_JARS, the package metamq-zookeeper, the user's cache, Maven
Central.

Every jar of the last three is pinned by SHA-512 here. A download is checked before it gets its name in the cache. All
jars are checked again at each use (7 MB hash in a few milliseconds), so a damaged cache repairs itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import importlib.util
import logging
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from metamq.errors import ConfigError, CorruptData

log = logging.getLogger("metamq.zk")

ZOOKEEPER_VERSION = "3.9.6"
NETTY_VERSION = "4.1.140.Final"
DEFAULT_REPOSITORY = "https://repo1.maven.org/maven2"

Progress = Callable[[str, int, int], None]
"""Called with (file name, bytes so far, bytes in total) while a jar is downloaded."""


@dataclass(frozen=True)
class Jar:
    """One artifact: `artifact` is its name without the version, `folder` its place in a Maven repository."""

    folder: str
    artifact: str
    version: str
    size: int
    sha512: str

    @property
    def file_name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"

    @property
    def location(self) -> str:
        return f"{self.folder}/{self.artifact}/{self.version}/{self.file_name}"


JARS = (
    Jar(
        "org/apache/zookeeper",
        "zookeeper",
        ZOOKEEPER_VERSION,
        1_369_631,
        "a30fea3338f70c8c18f5d7b860d556a22f6d55758c2e63379c6093d0e457251c"
        "88761b488b53d7e1eeb42c0a0bda4d46d9760f1466c768b72d6dddc0367212f3",
    ),
    Jar(
        "org/apache/zookeeper",
        "zookeeper-jute",
        ZOOKEEPER_VERSION,
        260_263,
        "7842e103df8258d246133be858328d5f469977abf740d2251f266837f8179f25"
        "f9b48713d667fce9d83e8a7cc1993c8628a2b8bfc90662192316cacb678f8add",
    ),
    Jar(
        "org/slf4j",
        "slf4j-api",
        "2.0.13",
        68_605,
        "b4eeb5757118e264ec7f107d879270784357380d6f53471b7874dd7e0166fdf5"
        "686a95eb66bab867abbe9536da032ab052e207165211391c293cbf6178431fb6",
    ),
    Jar(
        "io/dropwizard/metrics",
        "metrics-core",
        "4.1.12.1",
        105_355,
        "5bbcae7dd5df21c35f377749d9ecb67673089f1574bad2855ee8f8a90862ffd6"
        "0f5b475af30fdc771fbde03f59fa264e66c573a37c714d1f0fdcdf350f99276f",
    ),
    Jar(
        "org/xerial/snappy",
        "snappy-java",
        "1.1.10.5",
        2_299_797,
        "36c288aa84017b52362a49a20d1702151a16b9f58518b6877f11122941a549d9"
        "4fab8d515f7f1ad6384fb94be569328abf862edaf970c10a16832498dfda853b",
    ),
)

# Not needed to serve. With it, ZooKeeper logs why it did not start; with slf4j-api alone it logs nothing.
LOGGING_JAR = Jar(
    "org/slf4j",
    "slf4j-simple",
    "2.0.13",
    15_703,
    "9e79240611ecb9847391937a9c0e83b1ce619a370a0ee61d66d41117c44f453d"
    "f7af69853268f023dda46b1209b1cad0f0e2ede4581c8bce60e72083ae017e4d",
)

TLS_JARS = (
    Jar(
        "io/netty",
        "netty-handler",
        NETTY_VERSION,
        594_673,
        "a3f9ad79fcb5605eb8c84e1c7385c87f85efd99673bdab3c740d25a9a26e17d0"
        "6294a787efbd1b6cfd3fb33407a8de25dcafdcef9f9d9587d71a123ae6f28ac0",
    ),
    Jar(
        "io/netty",
        "netty-transport",
        NETTY_VERSION,
        524_238,
        "24482a3c99dc8944c6d6a1250d44dc436f9104c0e005e47b85b78f6ea93d28f3"
        "8168cca38f0cdebe206fcb40cdfce5aabeef94db514e60f4b4d4ed6e732cefcd",
    ),
    Jar(
        "io/netty",
        "netty-common",
        NETTY_VERSION,
        740_993,
        "8576ec7fe421a35559f36075a4a6dc37444e01c62186cc985fb527d9e8d0b306"
        "3cdf65e126de3add4fa4906012252fd2ccc303b48f44afe28cca1faea993d313",
    ),
    Jar(
        "io/netty",
        "netty-buffer",
        NETTY_VERSION,
        365_742,
        "2fdae24e53cf8de51baecc57b3584b6be86af72bc0de2c215675faf72fc9b91a"
        "a1e1fbab99885c002b069369b958d967f317fa63b03edc7ae7d0d0619cb926d7",
    ),
    Jar(
        "io/netty",
        "netty-codec",
        NETTY_VERSION,
        364_197,
        "3ad191af0c0ab24f13611e9d87cc7f95b782670587d288c3cd5b392c5f7eabcb"
        "8a05eeae51cb4ed9a2e7a5f770f8a330d6552a273cf2d9e9e6b975f197d8dc33",
    ),
    Jar(
        "io/netty",
        "netty-resolver",
        NETTY_VERSION,
        37_906,
        "eff8d920df0b322cfd69aa48dd4d4725718b22a8ae08425c22e443c432b87b8c"
        "3d203c5de71639214b369c8ea62e8e61324d8ce91002e1b9305f7867baec88e7",
    ),
    Jar(
        "io/netty",
        "netty-transport-native-unix-common",
        NETTY_VERSION,
        44_912,
        "3490e30e92b4096a2b04857e0dab57c8187d3a46dcfd1d9b8195e4b7bd685f3b"
        "84128694851839c00c560ebc9aae54137bb6447181893639aaf2be92f45aa908",
    ),
    Jar(
        "io/netty",
        "netty-transport-classes-epoll",
        NETTY_VERSION,
        147_654,
        "f52fff0db252dc0cc4f9405fb06caa791a525ec2d064b3150f42a7ae6a13008e"
        "2b5214fec767b6eac48f4f4ab1084a0b91fa82a34b18465a1e1ac59c9ba1a84a",
    ),
)
"""ZooKeeper serves TLS with Netty only."""

PINNED = (*JARS, *TLS_JARS, LOGGING_JAR)

_WAYS = (
    "Install the package metamq-zookeeper, which has the jars; or run `metamq zookeeper --fetch-jars` on a machine "
    "with a network, copy the folder that it names, and set METAMQ_ZOOKEEPER_JARS to the copy; or set it to the `lib` "
    "folder of ZooKeeper's own download, or the `jars` folder of an installed pyspark; or allow the download from "
    "Maven Central (METAMQ_MAVEN names a mirror; HTTPS_PROXY and SSL_CERT_FILE are used); "
    "or point METAMQ_ZOOKEEPER at a ZooKeeper that already runs."
)


def find_jars(progress: Progress | None = None, *, secure: bool = False) -> list[Path]:
    """The class path of the ZooKeeper server, with TLS if it is `secure`. Downloads it into the user's cache if it is
    nowhere else.

    Blocks during the download (4 MB, once per user; 7 MB with TLS). Raises ConfigError, which names every way to
    provide the jars, if there are none; CorruptData if a download does not have the pinned checksum.
    """
    setting = os.environ.get("METAMQ_ZOOKEEPER_JARS")
    if setting:
        return _jars_of_setting(Path(setting), secure=secure)
    wanted = PINNED if secure else (*JARS, LOGGING_JAR)
    installed = installed_folder()
    if installed is not None:
        paths = [installed / jar.file_name for jar in wanted]
        other = next((path for path, jar in zip(paths, wanted, strict=True) if not _intact(path, jar)), None)
        if other is None:
            return paths
        log.warning(
            "the package metamq-zookeeper is not used: %s is missing, or is another version. Install it again: "
            "pip install --force-reinstall metamq-zookeeper==%s",
            other, ZOOKEEPER_VERSION,
        )  # fmt: skip
    cache = cache_folder()
    return [fetched(jar, cache, progress) for jar in wanted]


def cache_folder() -> Path:
    """The folder for downloaded jars, one per ZooKeeper version."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "metamq" / f"zookeeper-{ZOOKEEPER_VERSION}"


def installed_folder() -> Path | None:
    """The folder with the jars of the package metamq-zookeeper, or None if it is not installed."""
    package = importlib.util.find_spec("metamq_zookeeper")
    return None if package is None or package.origin is None else Path(package.origin).parent / "jars"


def check_jars(paths: Sequence[Path]) -> None:
    """Raises CorruptData unless these are the pinned jars."""
    by_name = {path.name: path for path in paths}
    for jar in PINNED:
        path = by_name.get(jar.file_name, Path(jar.file_name))
        if not _intact(path, jar):
            raise CorruptData(str(path), f"it is missing, or is not the pinned {jar.file_name}", hint=_WAYS)


def jars_in_folder(folder: Path, *, secure: bool = False) -> tuple[list[Path], list[str]]:
    """The server's jars in `folder`, of any version, and the names of the missing ones."""
    found: list[Path] = []
    missing: list[str] = []
    for jar in (*JARS, *TLS_JARS) if secure else JARS:
        matches = sorted(folder.glob(f"{jar.artifact}-[0-9]*.jar"))
        if matches:
            found.append(matches[-1])
        else:
            missing.append(jar.artifact)
    found.extend(sorted(folder.glob(f"{LOGGING_JAR.artifact}-[0-9]*.jar"))[-1:])
    return found, missing


def _jars_of_setting(folder: Path, *, secure: bool) -> list[Path]:
    found, missing = jars_in_folder(folder, secure=secure)
    if missing:
        raise ConfigError(f"METAMQ_ZOOKEEPER_JARS={folder} has no jar of {', '.join(missing)}", hint=_WAYS)
    return found


def _intact(path: Path, jar: Jar) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha512").hexdigest() == jar.sha512
    except OSError:
        return False


def fetched(jar: Jar, cache: Path, progress: Progress | None) -> Path:
    """The intact jar in the folder `cache`; downloads it if it is missing. Raises the errors of `find_jars`."""
    path = cache / jar.file_name
    if not _intact(path, jar):
        repository = (os.environ.get("METAMQ_MAVEN") or DEFAULT_REPOSITORY).rstrip("/")
        url = f"{repository}/{jar.location}"
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _download(url, jar, path, progress)
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            raise ConfigError(
                f"the jars of ZooKeeper are not here, and {url} cannot be fetched into {cache}: {error}", hint=_WAYS
            ) from error
    return path


def _download(url: str, jar: Jar, path: Path, progress: Progress | None) -> None:
    """Downloads a jar. Several processes may do this at once: each writes its own file, and the rename is atomic."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{jar.file_name}.", dir=path.parent)
    try:
        digest = hashlib.sha512()
        received = 0
        with os.fdopen(descriptor, "wb") as file, urllib.request.urlopen(url, timeout=30) as answer:
            while chunk := answer.read(65_536):
                received += len(chunk)
                if received > jar.size:
                    break
                digest.update(chunk)
                file.write(chunk)
                if progress is not None:
                    progress(jar.file_name, received, jar.size)
        if received != jar.size or digest.hexdigest() != jar.sha512:
            raise CorruptData(
                url,
                f"it is not the pinned {jar.file_name} ({jar.size:,} bytes)",
                hint="Nothing of it was kept. Something between here and the repository alters downloads, "
                "or METAMQ_MAVEN is not a Maven repository.",
            )
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
