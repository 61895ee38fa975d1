//! One instance over the admin interface: queries and commands, and the keeper's reply as a
//! response.
//!
//! Not here: instances themselves (`nagaya_keeper`), the commands (`cli::instance`).

use bytes::Bytes;
use http::{HeaderValue, Method, Response, StatusCode, header};
use nagaya_base::Code;
use nagaya_records::instance::{InstanceCommand, Tier};
use percent_encoding::percent_decode_str;
use serde_json::Value;

use super::api::{self, UriQuery};
use super::{AdminNode, ProblemReply};

/// The command does not fit the instance's present state, which is not an error of the keeper.
const CODE_UNFIT: Code = Code(512);

/// Answers a request for the rest after `/v1/instances/`.
pub async fn answer(node: &dyn AdminNode, method: &Method, rest: &str, query: &str) -> Response<Bytes> {
    let (site, act) = match read(method, rest, query) {
        Ok(asked) => asked,
        Err(problem) => return api::refuse(&problem),
    };
    let Some(text) = node.instance(site.clone(), act).await else {
        return api::refuse(&ProblemReply::silent("keeper"));
    };
    let said: Value = serde_json::from_str(&text).unwrap_or_default();
    if said.is_null() {
        return api::refuse(&ProblemReply::not_found("instance", &site));
    }
    if let Some(problem) = problem(&said) {
        return api::refuse(&problem);
    }
    let mut response = Response::new(Bytes::from(text));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn read(method: &Method, rest: &str, query: &str) -> Result<(String, InstanceCommand), Box<ProblemReply>> {
    let (site, what) = rest.split_once('/').unwrap_or((rest, ""));
    let query = UriQuery::read(query);
    query.allow(if what == "rest" { &["to"] } else { &[] })?;
    let act = match what {
        "" => InstanceCommand::Inspect,
        "logs" => InstanceCommand::Logs,
        "wake" => InstanceCommand::Wake,
        "rest" => InstanceCommand::Rest { to: query.get("to").map(|word| tier(&word)).transpose()? },
        "image" => InstanceCommand::Image,
        "restart" => InstanceCommand::Restart,
        "stop" => InstanceCommand::Stop,
        _ => return Err(api::unknown_path(&format!("/v1/instances/{rest}"))),
    };
    let needed = if matches!(act, InstanceCommand::Inspect | InstanceCommand::Logs) {
        Method::GET
    } else {
        Method::POST
    };
    if *method != needed {
        return Err(api::wrong_method(method, needed.as_str()));
    }
    Ok((percent_decode_str(site).decode_utf8_lossy().into_owned(), act))
}

fn tier(word: &str) -> Result<Tier, Box<ProblemReply>> {
    Tier::ALL.into_iter().find(|tier| tier.as_str() == word).ok_or_else(|| {
        let known: Vec<_> = Tier::ALL.iter().rev().map(|tier| tier.as_str()).collect();
        let detail = format!("'{word}' is no tier: use {}", known.join(", "));
        ProblemReply::request(StatusCode::BAD_REQUEST, detail)
    })
}

/// Returns the keeper's refusal or failure: `{"error": "...", "code": "NGYnnnn"}`.
fn problem(said: &Value) -> Option<Box<ProblemReply>> {
    let error = said.get("error")?;
    let detail = error.as_str().map_or_else(|| error.to_string(), ToOwned::to_owned);
    let number = |code: &Value| match code {
        Value::String(text) => text.trim_start_matches("NGY").parse().ok(),
        code => u16::try_from(code.as_u64()?).ok(),
    };
    let code = said.get("code").and_then(number).map_or(CODE_UNFIT, Code);
    Some(ProblemReply::instance(StatusCode::CONFLICT, code, &detail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_path_is_one_act_and_has_one_method() {
        let read = |method: Method, rest: &str, query: &str| {
            read(&method, rest, query).map_err(|problem| problem.status)
        };
        let wiki = |act| Ok(("wiki".to_owned(), act));
        assert_eq!(read(Method::GET, "wiki", ""), wiki(InstanceCommand::Inspect));
        assert_eq!(read(Method::GET, "w%69ki/logs", ""), wiki(InstanceCommand::Logs));
        assert_eq!(read(Method::POST, "wiki/wake", ""), wiki(InstanceCommand::Wake));
        assert_eq!(read(Method::POST, "wiki/rest", ""), wiki(InstanceCommand::Rest { to: None }));
        let frozen = InstanceCommand::Rest { to: Some(Tier::Frozen) };
        assert_eq!(read(Method::POST, "wiki/rest", "to=frozen"), wiki(frozen));
        assert_eq!(read(Method::POST, "wiki/rest", "to=asleep"), Err(400));
        assert_eq!(read(Method::POST, "wiki/wake", "to=frozen"), Err(400));
        assert_eq!(read(Method::GET, "wiki/wake", ""), Err(405));
        assert_eq!(read(Method::POST, "wiki", ""), Err(405));
        assert_eq!(read(Method::POST, "wiki/dance", ""), Err(404));
    }

    #[test]
    fn the_keepers_error_keeps_its_words_and_its_code() {
        let of = |said: Value| problem(&said).map(|problem| (problem.code.clone(), problem.detail.clone()));
        let said = serde_json::json!({ "error": "it is in use", "code": "NGY0321" });
        assert_eq!(of(said), Some(("NGY0321".into(), "it is in use".into())));
        let said = serde_json::json!({ "error": "no", "code": 322 });
        assert_eq!(of(said), Some(("NGY0322".into(), "no".into())));
        assert_eq!(of(serde_json::json!({ "error": "no" })), Some(("NGY0512".into(), "no".into())));
        assert_eq!(of(serde_json::json!({ "ok": true })), None);
    }
}
