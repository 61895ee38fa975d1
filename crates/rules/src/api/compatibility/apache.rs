//! The table for `Apache` of mod_mruby.

use super::Class;
use super::Row;
use super::Support::{Differs, Missing, Same};

const NO_REWRITE: &str = "it would make the request another one for what answers than for the log; set \
    `uri`, `args` or a header field";
const USER: &str =
    "as the client names itself in `Authorization: Basic`; nobody has checked the password when rules run";
const BACKEND: &str = "what answers is set in the site's record";
const NO_BODY: &str = "rules read the head of a request; its body is passed on as it comes";
const NOT_OPENED: &str = "the file is opened by the keeper under the tenant's rights, after the rules";
const CONFIGURATION: &str = "a setting of the node; see `nagaya config dump`";
const NO_WORKERS: &str = "there is no table of workers; `nagaya status` and the metrics show what runs";
const SITE_FREE: &str = "how many more requests of the site may run at once; `site` has more (docs/rules.md)";
const BODIES: &str = "rules do not change bodies";
const PASSWORDS: &str = "rules do not check passwords; the site's application does";
const TEXT: &str = "adds to the text of the answer; without `Apache.return` it is answered with 200";

pub const CLASSES: &[Class] = &[
    Class {
        name: "Apache",
        rows: &[
            Row(".rputs .echo", Differs(TEXT)),
            Row(
                ".return",
                Differs(
                    "sets the answer and goes on, like upstream; numbers that are no HTTP status are an \
                        `ArgumentError`",
                ),
            ),
            Row(".sleep", Missing("it would hold up all requests of the thread; use `limit` or `lane`")),
            Row(".errlogger .log", Same),
            Row(".syslogger .syslog", Differs("to the node's own log")),
            Row(".module_name", Differs("`nagaya`")),
            Row(".module_version", Differs("nagaya's")),
            Row(".server_version", Differs("`nagaya/` and its version")),
            Row(".server_build", Missing("see `nagaya --version`")),
            Row(".remove_global_variable", Missing("assign nil instead")),
            Row(".count_arena", Missing("a number of mruby's own that means nothing here")),
            Row(".get_tid", Differs("0, which `attach` takes as this request")),
        ],
    },
    Class {
        name: "Kernel",
        rows: &[
            Row("server_name", Differs("`Apache`, also in files that use `Nginx`: both are there")),
            Row("get_server_class", Differs("`Apache`, likewise")),
            Row(
                "run",
                Missing("rules do not make responses from Rack applications; run the application as a site"),
            ),
        ],
    },
    Class {
        name: "Apache::Request",
        rows: &[
            Row(".new", Same),
            Row("the_request protocol unparsed_uri uri args hostname method scheme", Same),
            Row("user", Differs(USER)),
            Row("ap_auth_type", Differs("`Basic` where there is a `user`")),
            Row("filename canonical_filename", Differs("nil for sites without files")),
            Row("path_info document_root", Differs("nil for sites without files")),
            Row("range", Same),
            Row(
                "status content_length status_line",
                Differs("of the response, in the last phase; before: 200, 0 and nil, like upstream"),
            ),
            Row(
                "content_type content_encoding",
                Differs("of the response, in the last phase; before: what rules have set"),
            ),
            Row("vlist_validator handler", Differs("nil")),
            Row(
                "uri= args= user= document_root= filename=",
                Differs("as the request goes on from there; nil takes it back"),
            ),
            Row("content_type= content_encoding= status=", Differs("of the response that the site gives")),
            Row(
                "the_request= protocol= vlist_validator= ap_auth_type= unparsed_uri= canonical_filename= \
                    path_info= hostname= status_line= method= range= content_length=",
                Missing(NO_REWRITE),
            ),
            Row("handler= proxyreq= reverse_proxy", Missing(BACKEND)),
            Row("proxyreq", Differs("`Apache::PROXYREQ_NONE`")),
            Row("assbackwards header_only proto_num method_number", Same),
            Row(
                "chunked read_body read_chunked used_path_info eos_sent no_cache no_local_copy",
                Differs("as upstream says before the response: 0"),
            ),
            Row("response_time", Same),
            Row(
                "main? sub_request? prev? internal_redirect? next? external_redirect?",
                Differs("false: nagaya makes no requests of its own"),
            ),
            Row("run_handler", Missing(BACKEND)),
            Row("body", Missing(NO_BODY)),
            Row("error_log_into", Missing("`file` in `[log]` says where the log is")),
            Row("error_log log", Same),
            Row("notes headers_in headers_out", Same),
            Row("finfo", Missing(NOT_OPENED)),
        ],
    },
    Class { name: "Apache::Notes", rows: &[Row("[] []=", Same)] },
    Class {
        name: "Apache::Headers_in",
        rows: &[
            Row("[]", Differs("of fields that came several times, the first")),
            Row("[]=", Differs("seen by later rules and by what answers; nil removes the field")),
            Row("all user_agent referer", Same),
        ],
    },
    Class {
        name: "Apache::Headers_out",
        rows: &[
            Row("[]", Differs("what rules have set, and in the last phase the response's; nil if absent")),
            Row(
                "[]=",
                Differs("`Set-Cookie` is added, others are replaced, like upstream; nil removes the field"),
            ),
            Row("all", Same),
        ],
    },
    Class {
        name: "Apache::Finfo",
        rows: &[Row(
            "permission mode filetype group user device inode nlink size csize atime ctime mtime",
            Missing(NOT_OPENED),
        )],
    },
    Class {
        name: "Apache::Connection",
        rows: &[
            Row(".new", Same),
            Row(
                "remote_ip remote_port local_ip local_port",
                Differs("behind a trusted proxy the client's address and port as the proxy gives them"),
            ),
            Row(
                "remote_host remote_logname local_host",
                Differs("nil: nagaya does not ask DNS or identd for each request"),
            ),
            Row("keepalives", Same),
            Row("data_in_input_filters", Differs("0")),
        ],
    },
    Class {
        name: "Apache::Server",
        rows: &[
            Row(".new", Same),
            Row("hostname", Differs("the host the request asks for")),
            Row("document_root", Differs("of the site")),
            Row("is_virtual", Differs("1")),
            Row(
                "error_fname error_fname= loglevel loglevel= path admin redirect_server_scheme defn_name \
                    keep_alive_max keep_alive pathlen limit_req_line limit_req_fieldsize \
                    limit_req_fields timeout timeout= keep_alive_timeout redirect_server_port \
                    defn_line_number",
                Missing(CONFIGURATION),
            ),
        ],
    },
    Class {
        name: "Apache::Env",
        rows: &[
            Row(".new", Same),
            Row(
                "[] all",
                Differs("what rules have set; the rest of a program's environment is made after the rules"),
            ),
            Row(
                "[]=",
                Differs(
                    "passed to CGI and PHP programs and to scripts of applications, but for names that are the server's or decide \
                     what is loaded (NGY0429)",
                ),
            ),
        ],
    },
    Class {
        name: "Apache::Scoreboard",
        rows: &[
            Row(".new", Same),
            Row("loadavg", Same),
            Row("busy_worker", Differs("requests that run on this node")),
            Row("idle_worker", Differs(SITE_FREE)),
            Row(
                "status counter pid cpu_load server_limit thread_limit access_counter total_kbyte \
                    total_access uptime restart_time",
                Missing(NO_WORKERS),
            ),
        ],
    },
    Class {
        name: "Apache::AuthnProvider",
        rows: &[Row("user password realm rethash rethash=", Missing(PASSWORDS))],
    },
    Class {
        name: "Apache::Filter",
        rows: &[Row(
            "puts insert_tail insert_head insert_eos destroy cleanup flatten length empty? first_bucket \
                uid gid error_create body body=",
            Missing(BODIES),
        )],
    },
];
