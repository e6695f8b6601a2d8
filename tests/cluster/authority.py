"""A small certificate authority for tests. Files are replaced by renaming, as a mounted Secret's are."""
import datetime
import os
import pathlib

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_EPOCH = datetime.datetime.now(datetime.timezone.utc)


def _name(text):
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _write(path, data):
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    os.replace(fresh, path)


class Files:
    """PEM files of one party: `certificate`, `key`, and `ca`, whom it trusts."""

    def __init__(self, folder, name, ca):
        self.certificate, self.key, self.ca = folder / f"{name}.crt", folder / f"{name}.key", ca

    def read(self):
        return self.certificate.read_bytes(), self.key.read_bytes()


class Authority:
    def __init__(self, folder, name="ca"):
        self.folder = pathlib.Path(folder)
        self.name = name
        self.file = self.folder / f"{name}.crt"
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            self._builder(name, name, self._key, days=30)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        _write(self.file, certificate.public_bytes(serialization.Encoding.PEM))

    @staticmethod
    def _builder(subject, issuer, key, days):
        return (
            x509.CertificateBuilder()
            .subject_name(_name(subject))
            .issuer_name(_name(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_EPOCH - datetime.timedelta(days=10))
            .not_valid_after(_EPOCH + datetime.timedelta(days=days))
        )

    def issue(self, name, *, uris=(), hosts=(), days=7):
        """Writes NAME.crt and NAME.key, again if they are there. `days` < 0: has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.UniformResourceIdentifier(uri) for uri in uris] + [x509.DNSName(host) for host in hosts]
        certificate = (
            self._builder(name, self.name, key, days)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = Files(self.folder, name, self.file)
        _write(files.key, key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                            serialization.NoEncryption()))
        _write(files.certificate, certificate.public_bytes(serialization.Encoding.PEM))
        return files


def serial_of(pem):
    return x509.load_pem_x509_certificate(pem).serial_number
