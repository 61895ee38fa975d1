//! An HTTP/1 client that sends exactly the bytes it is given and reads exactly what comes back.
//!
//! Real clients (curl, nghttp, openssl) are run as programs by the tests. Not here: any help to form a valid
//! request; invalid ones are the point.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType};

use crate::wait;

/// Longest wait for the next bytes; only reached when a test fails.
const PATIENCE: Duration = wait::SOON.saturating_mul(wait::STRETCH_MAX);

/// One response as it was on the wire.
#[derive(Clone, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub trailers: Vec<(String, String)>,
}

/// Bytes of a body that a failed test shows.
const BODY_SHOWN: usize = 400;

impl fmt::Debug for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = String::from_utf8_lossy(&self.body[..self.body.len().min(BODY_SHOWN)]);
        write!(f, "{} {:?}, {} bytes: {shown:?}", self.status, self.headers, self.body.len())
    }
}

impl Response {
    /// The field's first value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The response, if its status is this one.
    #[track_caller]
    pub fn expect(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{self:?}");
        self
    }
}

/// A client's connection.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    /// Read and not used yet.
    input: Vec<u8>,
}

impl Connection {
    #[track_caller]
    pub fn open(address: SocketAddr) -> Self {
        Self::try_open(address).unwrap_or_else(|error| panic!("connecting to {address}: {error}"))
    }

    pub fn try_open(address: SocketAddr) -> io::Result<Self> {
        Self::of(TcpStream::connect(address)?)
    }

    /// Connects from this address of the machine, which all of 127.0.0.0/8 are.
    #[track_caller]
    pub fn open_from(source: Ipv4Addr, address: SocketAddr) -> Self {
        let connect = || {
            let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
            rustix::net::bind(&socket, &SocketAddr::from((source, 0)))?;
            rustix::net::connect(&socket, &address)?;
            Self::of(TcpStream::from(socket))
        };
        connect().unwrap_or_else(|error: io::Error| panic!("connecting from {source} to {address}: {error}"))
    }

    fn of(stream: TcpStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, input: Vec::new() })
    }

    /// Sends these bytes and no others.
    #[track_caller]
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> &mut Self {
        self.stream.write_all(bytes.as_ref()).expect("the node takes what is sent");
        self
    }

    /// Sends what the other side still takes: it may have refused the request already.
    pub fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        self.stream.write_all(bytes.as_ref())
    }

    /// For a thread that sends while this one reads.
    #[track_caller]
    pub fn clone_stream(&self) -> TcpStream {
        self.stream.try_clone().expect("an open connection")
    }

    /// Says that no more will be sent.
    pub fn finish(&mut self) -> &mut Self {
        self.stream.shutdown(Shutdown::Write).expect("the connection is open");
        self
    }

    /// The next response, read to the end of its body.
    #[track_caller]
    pub fn response(&mut self) -> Response {
        self.read(true)
            .unwrap_or_else(|error| panic!("no response: {error}; read so far: {:?}", self.so_far()))
    }

    /// The next response to a HEAD: fields that announce a body, and none.
    #[track_caller]
    pub fn response_to_head(&mut self) -> Response {
        self.read(false)
            .unwrap_or_else(|error| panic!("no response: {error}; read so far: {:?}", self.so_far()))
    }

    /// The next response, or how it broke off.
    pub fn try_response(&mut self) -> io::Result<Response> {
        self.read(true)
    }

    /// True if something has come that was not read yet.
    #[track_caller]
    pub fn is_answered(&self) -> bool {
        self.stream.set_nonblocking(true).expect("an open connection");
        let has_come = !self.input.is_empty() || self.stream.peek(&mut [0]).is_ok();
        self.stream.set_nonblocking(false).expect("an open connection");
        has_come
    }

    /// True once the other side has closed and nothing was left to read.
    pub fn is_closed(&mut self) -> bool {
        self.input.is_empty() && matches!(self.fill(), Ok(0) | Err(_))
    }

    /// How the connection ends, if not by a proper close.
    pub fn next_error(&mut self) -> Option<io::Error> {
        loop {
            match self.fill() {
                Ok(0) => return None,
                Ok(_) => {}
                Err(error) => return Some(error),
            }
        }
    }

    /// Bytes from an upgraded connection, or of half a response.
    #[track_caller]
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        while self.input.len() < count {
            let read = self.fill().expect("more bytes");
            assert_ne!(read, 0, "the connection ended after {:?}", self.so_far());
        }
        self.input.drain(..count).collect()
    }

    /// Everything until the other side closes.
    #[track_caller]
    pub fn until_end(&mut self) -> Vec<u8> {
        while self.fill().unwrap_or_else(|error| panic!("{error} after {:?}", self.so_far())) > 0 {}
        std::mem::take(&mut self.input)
    }

    /// The head of the next response with status and fields; the body stays on the connection.
    #[track_caller]
    pub fn head(&mut self) -> Response {
        self.read_head().unwrap_or_else(|error| panic!("no head: {error}; read so far: {:?}", self.so_far()))
    }

    fn so_far(&self) -> String {
        String::from_utf8_lossy(&self.input).into_owned()
    }

    fn fill(&mut self) -> io::Result<usize> {
        let mut buffer = [0; 64 << 10];
        let read = loop {
            match self.stream.read(&mut buffer) {
                // A read with a timeout is not resumed after the process was stopped for a moment.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        self.input.extend_from_slice(&buffer[..read]);
        Ok(read)
    }

    fn more(&mut self) -> io::Result<()> {
        match self.fill()? {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed")),
            _ => Ok(()),
        }
    }

    fn line(&mut self) -> io::Result<String> {
        loop {
            if let Some(end) = self.input.windows(2).position(|pair| pair == b"\r\n") {
                let line = String::from_utf8_lossy(&self.input[..end]).into_owned();
                self.input.drain(..end + 2);
                return Ok(line);
            }
            self.more()?;
        }
    }

    fn fields(&mut self) -> io::Result<Vec<(String, String)>> {
        let mut fields = Vec::new();
        loop {
            let line = self.line()?;
            if line.is_empty() {
                return Ok(fields);
            }
            let (name, value) = line.split_once(':').ok_or_else(|| invalid(&line))?;
            fields.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    fn exactly(&mut self, count: usize) -> io::Result<Vec<u8>> {
        while self.input.len() < count {
            self.more()?;
        }
        Ok(self.input.drain(..count).collect())
    }

    fn read_head(&mut self) -> io::Result<Response> {
        let line = self.line()?;
        let status = line.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
        let status = status.ok_or_else(|| invalid(&line))?;
        Ok(Response { status, headers: self.fields()?, body: Vec::new(), trailers: Vec::new() })
    }

    fn read(&mut self, with_body: bool) -> io::Result<Response> {
        let mut response = self.read_head()?;
        if !with_body || response.status < 200 || matches!(response.status, 204 | 304) {
            return Ok(response);
        }
        let length = response.header("content-length").map(str::to_owned);
        if response.header("transfer-encoding") == Some("chunked") {
            loop {
                let line = self.line()?;
                let length = usize::from_str_radix(&line, 16).map_err(|_| invalid(&line))?;
                if length == 0 {
                    response.trailers = self.fields()?;
                    return Ok(response);
                }
                response.body.extend(self.exactly(length)?);
                self.line()?;
            }
        } else if let Some(length) = length {
            response.body = self.exactly(length.parse().map_err(|_| invalid(&length))?)?;
        } else {
            while self.fill()? > 0 {}
            response.body = std::mem::take(&mut self.input);
        }
        Ok(response)
    }
}

fn invalid(line: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not HTTP: {line:?}"))
}

/// A GET on a connection of its own.
#[track_caller]
pub fn get(address: SocketAddr, host: &str, target: &str) -> Response {
    get_with(address, host, target, "")
}

/// A GET with further header lines, each ended by CR LF.
#[track_caller]
pub fn get_with(address: SocketAddr, host: &str, target: &str, fields: &str) -> Response {
    let request = format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n{fields}Connection: close\r\n\r\n");
    Connection::open(address).send(request).response()
}

/// A POST on a connection of its own.
#[track_caller]
pub fn post(address: SocketAddr, host: &str, target: &str, body: &str) -> Response {
    let length = body.len();
    let request = format!(
        "POST {target} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    Connection::open(address).send(request).response()
}
