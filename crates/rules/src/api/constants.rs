//! The numbers of `Apache` and `Nginx`: statuses, methods, levels of the log.
//!
//! Not here: their use by rules (`apache`, `nginx`).

/// Methods in the order of their numbers (`M_GET` and so on, `httpd.h`); any other is `M_INVALID`.
pub const METHODS: [&str; 26] = [
    "GET",
    "PUT",
    "POST",
    "DELETE",
    "CONNECT",
    "OPTIONS",
    "TRACE",
    "PATCH",
    "PROPFIND",
    "PROPPATCH",
    "MKCOL",
    "COPY",
    "MOVE",
    "LOCK",
    "UNLOCK",
    "VERSION-CONTROL",
    "CHECKOUT",
    "UNCHECKOUT",
    "CHECKIN",
    "UPDATE",
    "LABEL",
    "REPORT",
    "MKWORKSPACE",
    "MKACTIVITY",
    "BASELINE-CONTROL",
    "MERGE",
];

macro_rules! constants {
    ($($class:literal { $($name:literal = $value:literal),+ $(,)? })+) => {
        &[$($(($class, $name, $value)),+),+]
    };
}

/// Class, name, value.
pub const ALL: &[(&str, &str, i64)] = constants! {
    "Apache" {
        "OK" = 0, "DECLINED" = -1,
        "HTTP_CONTINUE" = 100, "HTTP_SWITCHING_PROTOCOLS" = 101, "HTTP_PROCESSING" = 102,
        "HTTP_OK" = 200, "HTTP_CREATED" = 201, "HTTP_ACCEPTED" = 202, "HTTP_NON_AUTHORITATIVE" = 203,
        "HTTP_NO_CONTENT" = 204, "HTTP_RESET_CONTENT" = 205, "HTTP_PARTIAL_CONTENT" = 206,
        "HTTP_MULTI_STATUS" = 207,
        "HTTP_MULTIPLE_CHOICES" = 300, "HTTP_MOVED_PERMANENTLY" = 301, "HTTP_MOVED_TEMPORARILY" = 302,
        "HTTP_SEE_OTHER" = 303, "HTTP_NOT_MODIFIED" = 304, "HTTP_USE_PROXY" = 305,
        "HTTP_TEMPORARY_REDIRECT" = 307,
        "HTTP_BAD_REQUEST" = 400, "HTTP_UNAUTHORIZED" = 401, "HTTP_PAYMENT_REQUIRED" = 402,
        "HTTP_FORBIDDEN" = 403, "HTTP_NOT_FOUND" = 404, "HTTP_METHOD_NOT_ALLOWED" = 405,
        "HTTP_NOT_ACCEPTABLE" = 406, "HTTP_PROXY_AUTHENTICATION_REQUIRED" = 407,
        "HTTP_REQUEST_TIME_OUT" = 408, "HTTP_CONFLICT" = 409, "HTTP_GONE" = 410,
        "HTTP_LENGTH_REQUIRED" = 411, "HTTP_PRECONDITION_FAILED" = 412,
        "HTTP_REQUEST_ENTITY_TOO_LARGE" = 413, "HTTP_REQUEST_URI_TOO_LARGE" = 414,
        "HTTP_UNSUPPORTED_MEDIA_TYPE" = 415, "HTTP_RANGE_NOT_SATISFIABLE" = 416,
        "HTTP_EXPECTATION_FAILED" = 417, "HTTP_UNPROCESSABLE_ENTITY" = 422, "HTTP_LOCKED" = 423,
        "HTTP_INTERNAL_SERVER_ERROR" = 500, "HTTP_NOT_IMPLEMENTED" = 501, "HTTP_BAD_GATEWAY" = 502,
        "HTTP_SERVICE_UNAVAILABLE" = 503, "HTTP_VARIANT_ALSO_VARIES" = 506, "HTTP_NOT_EXTENDED" = 510,
        "M_GET" = 0, "M_PUT" = 1, "M_POST" = 2, "M_DELETE" = 3, "M_CONNECT" = 4, "M_OPTIONS" = 5,
        "M_TRACE" = 6, "M_PATCH" = 7, "M_PROPFIND" = 8, "M_PROPPATCH" = 9, "M_MKCOL" = 10, "M_COPY" = 11,
        "M_MOVE" = 12, "M_LOCK" = 13, "M_UNLOCK" = 14, "M_VERSION_CONTROL" = 15, "M_CHECKOUT" = 16,
        "M_UNCHECKOUT" = 17, "M_CHECKIN" = 18, "M_UPDATE" = 19, "M_LABEL" = 20, "M_REPORT" = 21,
        "M_MKWORKSPACE" = 22, "M_MKACTIVITY" = 23, "M_BASELINE_CONTROL" = 24, "M_MERGE" = 25,
        "M_INVALID" = 26,
        "APLOG_EMERG" = 0, "APLOG_ALERT" = 1, "APLOG_CRIT" = 2, "APLOG_ERR" = 3, "APLOG_WARNING" = 4,
        "APLOG_NOTICE" = 5, "APLOG_INFO" = 6, "APLOG_DEBUG" = 7,
        "LOG_EMERG" = 0, "LOG_ALERT" = 1, "LOG_CRIT" = 2, "LOG_ERR" = 3, "LOG_WARN" = 4, "LOG_WARNING" = 4,
        "LOG_NOTICE" = 5, "LOG_INFO" = 6, "LOG_DEBUG" = 7,
        "PROXYREQ_NONE" = 0, "PROXYREQ_PROXY" = 1, "PROXYREQ_REVERSE" = 2, "PROXYREQ_RESPONSE" = 3,
    }
    "Nginx" {
        "OK" = 0, "ERROR" = -1, "AGAIN" = -2, "BUSY" = -3, "DONE" = -4, "DECLINED" = -5, "ABORT" = -6,
        "HTTP_CONTINUE" = 100, "HTTP_SWITCHING_PROTOCOLS" = 101, "HTTP_PROCESSING" = 102,
        "HTTP_OK" = 200, "HTTP_CREATED" = 201, "HTTP_ACCEPTED" = 202, "HTTP_NO_CONTENT" = 204,
        "HTTP_PARTIAL_CONTENT" = 206,
        "HTTP_SPECIAL_RESPONSE" = 300, "HTTP_MOVED_PERMANENTLY" = 301, "HTTP_MOVED_TEMPORARILY" = 302,
        "HTTP_SEE_OTHER" = 303, "HTTP_NOT_MODIFIED" = 304, "HTTP_TEMPORARY_REDIRECT" = 307,
        "HTTP_BAD_REQUEST" = 400, "HTTP_UNAUTHORIZED" = 401, "HTTP_FORBIDDEN" = 403, "HTTP_NOT_FOUND" = 404,
        "HTTP_NOT_ALLOWED" = 405, "HTTP_REQUEST_TIME_OUT" = 408, "HTTP_CONFLICT" = 409,
        "HTTP_LENGTH_REQUIRED" = 411, "HTTP_PRECONDITION_FAILED" = 412,
        "HTTP_REQUEST_ENTITY_TOO_LARGE" = 413, "HTTP_REQUEST_URI_TOO_LARGE" = 414,
        "HTTP_UNSUPPORTED_MEDIA_TYPE" = 415, "HTTP_RANGE_NOT_SATISFIABLE" = 416,
        "HTTP_TOO_MANY_REQUESTS" = 429, "HTTP_CLOSE" = 444, "HTTP_NGINX_CODES" = 494,
        "HTTP_REQUEST_HEADER_TOO_LARGE" = 494, "HTTPS_CERT_ERROR" = 495, "HTTPS_NO_CERT" = 496,
        "HTTP_TO_HTTPS" = 497, "HTTP_CLIENT_CLOSED_REQUEST" = 499,
        "HTTP_INTERNAL_SERVER_ERROR" = 500, "HTTP_NOT_IMPLEMENTED" = 501, "HTTP_BAD_GATEWAY" = 502,
        "HTTP_SERVICE_UNAVAILABLE" = 503, "HTTP_GATEWAY_TIME_OUT" = 504, "HTTP_INSUFFICIENT_STORAGE" = 507,
        "LOG_STDERR" = 0, "LOG_EMERG" = 1, "LOG_ALERT" = 2, "LOG_CRIT" = 3, "LOG_ERR" = 4, "LOG_WARN" = 5,
        "LOG_NOTICE" = 6, "LOG_INFO" = 7, "LOG_DEBUG" = 8,
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_have_the_numbers_of_their_constants() {
        for (at, method) in METHODS.iter().enumerate() {
            let constant = format!("M_{}", method.replace('-', "_"));
            let value = ALL.iter().find(|(class, name, _)| *class == "Apache" && *name == constant);
            assert_eq!(value.map(|(_, _, value)| *value), i64::try_from(at).ok(), "{constant}");
        }
    }

    #[test]
    fn each_constant_has_one_value() {
        for (at, (class, name, _)) in ALL.iter().enumerate() {
            assert!(!ALL[..at].iter().any(|(of, have, _)| of == class && have == name), "{class}::{name}");
        }
    }
}
