"""Answers with a page made from thirty rows of a database, the last word of the path: mariadb or postgresql.
Any other path needs no database. It uses no library, so that a machine starts it in little time and memory."""
import os
import socket
import struct

PASSWORD = os.environ.get('DATABASE_PASSWORD', '').encode()


class Stream:
    def __init__(self, family, address):
        self.socket = socket.socket(family)
        self.socket.connect(address)
        self.rest = b''

    def take(self, count):
        while len(self.rest) < count:
            more = self.socket.recv(65536)
            if not more:
                raise OSError('the database has closed')
            self.rest += more
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken


class PostgreSql:
    def __init__(self):
        self.stream = Stream(socket.AF_INET, ('127.0.0.1', int(os.environ['POSTGRESQL_PORT'])))
        words = b'user\0pages\0database\0pages\0\0'
        self.stream.socket.sendall(struct.pack('!ii', len(words) + 8, 196608) + words)
        while True:
            kind, body = self.message()
            if kind == b'R' and body[:4] == b'\0\0\0\3':
                self.send(b'p', PASSWORD + b'\0')
            elif kind == b'E':
                raise OSError(body)
            elif kind == b'Z':
                return

    def send(self, kind, body):
        self.stream.socket.sendall(kind + struct.pack('!i', len(body) + 4) + body)

    def message(self):
        head = self.stream.take(5)
        return head[:1], self.stream.take(struct.unpack('!i', head[1:])[0] - 4)

    def ask(self, question):
        self.send(b'Q', question + b'\0')
        rows = []
        while True:
            kind, body = self.message()
            if kind == b'D':
                rows.append(self.row(body))
            elif kind == b'E':
                raise OSError(body)
            elif kind == b'Z':
                return rows

    def row(self, body):
        at, row = 2, []
        for _ in range(struct.unpack('!h', body[:2])[0]):
            size = struct.unpack('!i', body[at:at + 4])[0]
            row.append(body[at + 4:at + 4 + size].decode())
            at += 4 + size
        return row


class MariaDb:
    def __init__(self):
        from _sha1 import sha1
        self.stream = Stream(socket.AF_UNIX, os.environ['MARIADB_SOCKET'])
        greeting = self.message()
        # The server's version and a zero byte, a number of four bytes, and the first half of the salt.
        at = greeting.index(b'\0', 1) + 5
        salt = greeting[at:at + 8] + greeting[at + 27:at + 39]
        once = sha1(PASSWORD).digest()
        mask = sha1(salt + sha1(once).digest()).digest()
        token = bytes(a ^ b for a, b in zip(once, mask))
        # CLIENT_LONG_PASSWORD, CONNECT_WITH_DB, PROTOCOL_41, SECURE_CONNECTION, PLUGIN_AUTH.
        head = struct.pack('<IIB23x', 0x1 | 0x8 | 0x200 | 0x8000 | 0x80000, 1 << 24, 45)
        self.send(1, head + b'pages\0\x14' + token + b'pages\0mysql_native_password\0')
        answer = self.message()
        if answer[0]:
            raise OSError(answer)

    def send(self, number, body):
        self.stream.socket.sendall(struct.pack('<I', len(body))[:3] + bytes([number]) + body)

    def message(self):
        return self.stream.take(int.from_bytes(self.stream.take(4)[:3], 'little'))

    def ask(self, question):
        self.send(0, b'\3' + question)
        first = self.message()
        if first[0] == 255:
            raise OSError(first)
        # A description of each column, and the end of these.
        for _ in range(first[0] + 1):
            self.message()
        rows = []
        while True:
            body = self.message()
            if body[0] == 254 and len(body) < 9:
                return rows
            rows.append(self.row(body, first[0]))

    def row(self, body, columns):
        at, row = 0, []
        for _ in range(columns):
            size, at = body[at], at + 1
            if size == 252:
                size, at = int.from_bytes(body[at:at + 2], 'little'), at + 2
            row.append(body[at:at + size].decode())
            at += size
        return row


KINDS = {'mariadb': MariaDb, 'postgresql': PostgreSql}
opened = {}


def rows_of(kind):
    if kind not in opened:
        opened[kind] = KINDS[kind]()
    database = opened[kind]
    count = database.ask(b'SELECT count(*) FROM pages')[0][0]
    return count, database.ask(b'SELECT id, title, body FROM pages ORDER BY id LIMIT 30')


def page(kind):
    if kind not in KINDS:
        return 'a page without a database'
    try:
        count, rows = rows_of(kind)
    except OSError:
        # After a wake from an image its connection has ended.
        opened.pop(kind, None)
        count, rows = rows_of(kind)
    parts = ['<h1>' + count + ' entries</h1>']
    for number, title, body in rows:
        words = (word.replace('&', '&amp;').replace('<', '&lt;') for word in body.split())
        parts.append('<h2>' + number + ' ' + title + '</h2><p>' + ' '.join(words) + '</p>')
    return '\n'.join(parts)


def answer(peer):
    head = b''
    while b'\r\n\r\n' not in head:
        more = peer.recv(65536)
        if not more:
            return
        head += more
    path = head.split(b' ', 2)[1].decode()
    try:
        status, body = '200 OK', page(path.rsplit('/', 1)[-1])
    except Exception as error:
        opened.clear()
        status, body = '500 Failed', repr(error)
    body = body.encode()
    head = 'HTTP/1.0 %s\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n' % (status, len(body))
    peer.sendall(head.encode() + body)


listener = socket.socket(fileno=3)
while True:
    peer, _ = listener.accept()
    with peer:
        try:
            answer(peer)
        except OSError:
            pass
