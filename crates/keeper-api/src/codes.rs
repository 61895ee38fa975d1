//! Codes of failures that the client reports as the keeper does.

use nagaya_base::Code;

/// A message broke the protocol.
pub const PROTOCOL: Code = Code(313);

/// A limit on processes is reached.
pub const LIMIT: Code = Code(307);

/// A site's application is placed on another node, or on none.
pub const ELSEWHERE: Code = Code(360);
