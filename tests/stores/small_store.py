"""A small S3 server in this process: objects, ranges, conditions, uploads in parts, checksums.

It is stricter than moto: it compares the CRC-32 of parts and of whole objects. It counts requests, and a hook may make
any request fail, before or after it has its effect.
"""

import base64
import itertools
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape


@dataclass
class Object:
    content: bytes
    tag: str
    crc: int | None
    written: float
    generation: int = 0


@dataclass
class Upload:
    key: str
    checksums: bool
    began: float
    parts: dict[int, Object] = field(default_factory=dict)


class Asked(NamedTuple):
    """A request."""

    number: int
    method: str
    key: str
    action: str
    """get, head, list, put, delete, begin, part, complete, abort, list-parts or list-uploads."""
    nbytes: int
    """Length of its body."""


class Fault(NamedTuple):
    """A thing that happens to a request."""

    kind: str
    """status, reset, half (of the answer), other (bytes in the answer), or stall."""
    status: int = 0
    code: str = ""
    after: bool = False
    """True if the request has its effect before it fails."""
    seconds: float = 0.0


Hook = Callable[[Asked], Fault | None]
Answer = tuple[int, dict[str, str], bytes]
"""Status, headers, body."""


_Server = TypeVar("_Server", bound="SmallStore")


class SmallStore(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, bucket: str, handler: "type[Handler] | None" = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.bucket = bucket
        self.lock = threading.RLock()
        self.checksums = True
        """False: refuse requests with checksums, as old servers do."""
        self.clear()

    def clear(self) -> None:
        self.objects: dict[str, Object] = {}
        self.uploads: dict[str, Upload] = {}
        self.numbers = itertools.count()
        self.restart()

    def restart(self) -> None:
        """Count requests from 0 again, and let none fail."""
        self.asked: list[Asked] = []
        self.hook: Hook = lambda asked: None
        self.done: Hook = lambda asked: None
        self.headers: list[str] = []
        self.retry_after = ""
        """Seconds that an answer with an error asks to wait; empty for none."""

    def encrypt(self, directory: Path) -> None:
        """Speak TLS from now on, with a certificate that nobody trusts."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(_certificate(directory))
        self.socket = context.wrap_socket(self.socket, server_side=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def unfinished(self) -> list[str]:
        """Keys of the uploads that are neither completed nor aborted, in every kind of store."""
        with self.lock:
            return sorted(each.key for each in self.uploads.values())

    def put(self, key: str, content: bytes) -> None:
        with self.lock:
            self.objects[key] = self.made(content, zlib.crc32(content))

    def made(self, content: bytes, crc: int | None, tag: str = "") -> Object:
        """A new object with this content."""
        tag = tag or f'"{md5(content).hexdigest()}"'
        return Object(content, tag, crc, time.time(), next(self.numbers) + 1)

    def all_keys(self) -> list[str]:
        """The keys of all objects, in order."""
        with self.lock:
            return sorted(self.objects)

    def below(self, prefix: str) -> dict[str, bytes]:
        """Content of the objects below a prefix, by name."""
        with self.lock:
            found = {key: each.content for key, each in self.objects.items()}
        return {
            key.removeprefix(prefix): content
            for key, content in sorted(found.items())
            if key.startswith(prefix)
        }

    def of(self, action: str) -> list[Asked]:
        return [each for each in self.asked if each.action == action]

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        self.status, self.code = status, code


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SmallStore
    disable_nagle_algorithm = True

    def log_message(self, *arguments: object) -> None:
        pass

    def _handle(self) -> None:
        bucket, key = self.place()
        query = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the client was killed while it sent the body
            self.close_connection = True
            return
        with self.server.lock:
            action = self.action(key, query)
            asked = Asked(len(self.server.asked), self.command, key, action, len(body))
            self.server.asked.append(asked)
            self.server.headers.append(str(self.headers))
        fault = self.server.hook(asked)
        try:
            if fault is not None and fault.kind in ("status", "reset") and not fault.after:
                self._fail(fault)
                return
            self.require_signed()
            if bucket != self.server.bucket:
                raise Refused(404, "NoSuchBucket")
            method = getattr(self, f"do_{action.replace('-', '_')}")
            answer = method(key, query, body)
        except Refused as refused:
            answer = self.error(refused.status, refused.code)
        self.server.done(asked)
        if fault is not None and fault.kind in ("status", "reset"):
            self._fail(fault)
            return
        self._send(answer, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815

    def place(self) -> tuple[str, str]:
        """(bucket, key) of the request."""
        bucket, _, key = unquote(urlsplit(self.path).path.lstrip("/")).partition("/")
        return bucket, key

    def require_signed(self) -> None:
        """Raise Refused for a request without the right credentials."""

    def error(self, status: int, code: str) -> Answer:
        _, headers, content = answer_xml(f"<Error><Code>{code}</Code><Message>no</Message></Error>")
        return status, headers, content

    def action(self, key: str, query: dict[str, str]) -> str:
        if self.command == "POST":
            return "begin" if "uploads" in query else "complete"
        if self.command == "PUT":
            return "part" if "partNumber" in query else "put"
        if self.command == "DELETE":
            return "abort" if "uploadId" in query else "delete"
        if self.command == "HEAD":
            return "head"
        if "uploads" in query:
            return "list-uploads"
        if "uploadId" in query:
            return "list-parts"
        return "get" if key else "list"

    def _fail(self, fault: Fault) -> None:
        if fault.kind == "reset":
            self.close_connection = True
            self.connection.close()
            return
        status, headers, content = self.error(fault.status, fault.code)
        if self.server.retry_after:
            headers = headers | {"Retry-After": self.server.retry_after}
        self._send((status, headers, content), None)

    def _send(self, answer: Answer, fault: Fault | None) -> None:
        status, headers, content = answer
        kind = fault.kind if fault is not None else ""
        if fault is not None and kind == "stall":
            time.sleep(fault.seconds)
        if kind == "other" and content:
            content = bytes([content[0] ^ 0x55]) + content[1:]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if kind == "half":
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(content)

    # Objects.

    def described(self, found: Object, key: str) -> dict[str, str]:
        """The headers that describe an object."""
        return {"ETag": found.tag, "Last-Modified": formatdate(found.written, usegmt=True)}

    def span(self) -> str | None:
        """The range that is asked for."""
        return self.headers.get("Range")

    def _found(self, key: str) -> Object:
        found = self.server.objects.get(key)
        if found is None:
            raise Refused(404, "NoSuchKey")
        wanted = self.headers.get("If-Match")
        if wanted is not None and wanted != found.tag:
            raise Refused(412, "PreconditionFailed")
        return found

    def do_get(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        found = self._found(key)
        headers = self.described(found, key)
        span = self.span()
        if span is None:
            return 200, headers | self._checksum(found), found.content
        first, _, last = span.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last), len(found.content) - 1)
        if start >= len(found.content):
            raise Refused(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{end}/{len(found.content)}"
        return 206, headers, found.content[start : end + 1]

    def do_head(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        found = self._found(key)
        headers = self.described(found, key) | {"Content-Length": str(len(found.content))}
        return 200, headers | self._checksum(found), b""

    def _checksum(self, found: Object) -> dict[str, str]:
        """The headers with the checksum of an object, if the request asks for it."""
        if not self.headers.get("x-amz-checksum-mode") or found.crc is None:
            return {}
        return {
            "x-amz-checksum-crc32": _word(found.crc),
            "x-amz-checksum-type": "FULL_OBJECT",
        }

    def require(self, key: str) -> None:
        """Raise Refused if the request's condition doesn't hold."""
        there = self.server.objects.get(key)
        if self.headers.get("If-None-Match") == "*" and there is not None:
            raise Refused(412, "PreconditionFailed")
        wanted = self.headers.get("If-Match")
        if wanted is not None and there is None:
            raise Refused(404, "NoSuchKey")
        if wanted is not None and there is not None and wanted != there.tag:
            raise Refused(412, "PreconditionFailed")

    def do_put(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        made = self.checked(body)
        with self.server.lock:
            self.require(key)
            self.server.objects[key] = made
        return 200, {"ETag": made.tag}, b""

    def checked(self, body: bytes) -> Object:
        told = self.headers.get("x-amz-checksum-crc32")
        if told is not None and not self.server.checksums:
            raise Refused(501, "NotImplemented")
        crc = zlib.crc32(body)
        if told is not None and told != _word(crc):
            raise Refused(400, "BadDigest")
        digest = self.headers.get("Content-MD5")
        if digest is not None and digest != base64.b64encode(md5(body).digest()).decode():
            raise Refused(400, "BadDigest")
        return self.server.made(body, None if told is None else crc)

    def do_delete(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        with self.server.lock:
            self.server.objects.pop(key, None)
        return 204, {}, b""

    def do_list(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        names, folders = self.names(query.get("prefix", ""), query.get("delimiter"))
        listed = ""
        for name in names:
            each = self.server.objects[name]
            listed += (
                f"<Contents><Key>{escape(name)}</Key><Size>{len(each.content)}</Size>"
                f"<ETag>{escape(each.tag)}</ETag></Contents>"
            )
        for folder in folders:
            listed += f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
        return answer_xml(
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{listed}</ListBucketResult>"
        )

    def names(self, prefix: str, delimiter: str | None) -> tuple[list[str], list[str]]:
        """(objects below a prefix, folders up to the delimiter)."""
        with self.server.lock:
            found = sorted(key for key in self.server.objects if key.startswith(prefix))
        if not delimiter:
            return found, []
        rests = {name: name.removeprefix(prefix) for name in found}
        folders = {
            prefix + rest.partition(delimiter)[0] + delimiter
            for rest in rests.values()
            if delimiter in rest
        }
        return [name for name, rest in rests.items() if delimiter not in rest], sorted(folders)

    # Uploads.

    def do_begin(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        checksums = self.headers.get("x-amz-checksum-algorithm") is not None
        if checksums and not self.server.checksums:
            raise Refused(501, "NotImplemented")
        with self.server.lock:
            identity = f"upload-{next(self.server.numbers)}"
            self.server.uploads[identity] = Upload(key, checksums, time.time())
        return answer_xml(
            f"<InitiateMultipartUploadResult><UploadId>{identity}</UploadId></InitiateMultipartUploadResult>"
        )

    def _upload(self, key: str, query: dict[str, str]) -> Upload:
        found = self.server.uploads.get(query["uploadId"])
        if found is None or found.key != key:
            raise Refused(404, "NoSuchUpload")
        return found

    def do_part(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        made = self.checked(body)
        with self.server.lock:
            self._upload(key, query).parts[int(query["partNumber"])] = made
        return 200, {"ETag": made.tag}, b""

    def do_list_parts(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        listed = ""
        with self.server.lock:
            for number, each in sorted(self._upload(key, query).parts.items()):
                crc = (
                    "" if each.crc is None else f"<ChecksumCRC32>{_word(each.crc)}</ChecksumCRC32>"
                )
                listed += (
                    f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(each.tag)}</ETag>"
                    f"<Size>{len(each.content)}</Size>{crc}</Part>"
                )
        return answer_xml(
            f"<ListPartsResult><IsTruncated>false</IsTruncated>{listed}</ListPartsResult>"
        )

    def do_list_uploads(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        listed = ""
        with self.server.lock:
            for identity, each in self.server.uploads.items():
                if each.key.startswith(query.get("prefix", "")):
                    began = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(each.began))
                    listed += (
                        f"<Upload><Key>{escape(each.key)}</Key><UploadId>{identity}</UploadId>"
                        f"<Initiated>{began}</Initiated></Upload>"
                    )
        return answer_xml(
            f"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>{listed}</ListMultipartUploadsResult>"
        )

    def do_complete(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        with self.server.lock:
            upload = self._upload(key, query)
            self.require(key)
            parts = [upload.parts[number] for number in sorted(upload.parts)]
            content = b"".join(part.content for part in parts)
            told = self.headers.get("x-amz-checksum-crc32")
            crc = zlib.crc32(content) if told is not None or upload.checksums else None
            if crc is not None and told not in (None, _word(crc)):
                raise Refused(400, "BadDigest")
            digests = b"".join(bytes.fromhex(part.tag.strip('"')) for part in parts)
            tag = f'"{md5(digests).hexdigest()}-{len(parts)}"'
            self.server.objects[key] = self.server.made(
                content, crc if upload.checksums else None, tag
            )
            del self.server.uploads[query["uploadId"]]
        return answer_xml(
            f"<CompleteMultipartUploadResult><ETag>{escape(tag)}</ETag></CompleteMultipartUploadResult>"
        )

    def do_abort(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        with self.server.lock:
            self._upload(key, query)
            del self.server.uploads[query["uploadId"]]
        return 204, {}, b""


def _certificate(directory: Path) -> Path:
    """A file with a new key and a certificate that it signs itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    address = x509.IPAddress(IPv4Address("127.0.0.1"))
    builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    builder = builder.not_valid_before(now - timedelta(days=1))
    certificate = builder.not_valid_after(now + timedelta(days=1)).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = directory / "certificate.pem"
    path.write_bytes(key.private_bytes(pem, form, secret) + certificate.public_bytes(pem))
    return path


def _word(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def answer_xml(text: str) -> tuple[int, dict[str, str], bytes]:
    content = f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()
    return 200, {"Content-Type": "application/xml"}, content


@contextmanager
def running(store: _Server) -> Iterator[_Server]:
    thread = threading.Thread(target=store.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield store
    finally:
        store.shutdown()
        store.server_close()
