# The first content of the demo's Redmine, run once by `rails runner`. The password comes from the environment.

admin = User.find_by!(login: "admin")
admin.update!(password: ENV.fetch("ADMIN_PASSWORD"), must_change_passwd: false, language: "en")
Setting.app_title = "Redmine on nagaya"
Setting.welcome_text = "This Redmine rests when nobody uses it. Its projects and issues are in a SQLite database."
User.current = admin

project = Project.create!(
  name: "Instances", identifier: "instances", is_public: true,
  description: "Applications that rest at no cost and wake in milliseconds.",
  enabled_module_names: %w(issue_tracking wiki), trackers: Tracker.all
)
[
  ["Wake without anybody noticing", "Let it rest, then load this page again."],
  ["Rest deeper", "First the processes stand still; then they end, and an image on the disk is left."],
  ["Keep what was written", "Log in, write something here, let it rest, and see that all is still there."],
].each do |subject, text|
  Issue.create!(
    project: project, tracker: Tracker.first, author: admin, subject: subject, description: text,
    status: IssueStatus.first, priority: IssuePriority.first
  )
end
